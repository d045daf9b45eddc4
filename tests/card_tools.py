"""Where tests run: on a card or on the CPU, and the marks of tests that need a card."""

from __future__ import annotations

import pytest
import torch

from paged.kernels.launch import has_wgmma

ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CARD else "cpu")

needs_card = pytest.mark.skipif(not ON_CARD, reason="needs a card")
needs_hopper = pytest.mark.skipif(not has_wgmma(DEVICE), reason="needs a Hopper card")
