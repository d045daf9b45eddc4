"""Triton kernels run in Triton's interpreter where there is no card."""

import os

import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined, so before any of ours is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
