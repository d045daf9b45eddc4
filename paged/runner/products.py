"""Asking about a model's matrix products on a card before it serves."""

from __future__ import annotations

import torch

from paged.kernels.batch_layout import BatchLayout
from paged.kernels.linear import is_canonical
from paged.model.decoder import Decoder
from paged.runner.kv_cache import KVCache


@torch.inference_mode()
def prepare_products(decoder: Decoder, cache: KVCache, most_rows: int, most_logits: int) -> None:
    """Compare the library's products with ours where they may take their place; needs room for a product's operands.

    Args:
        decoder: whose products.
        cache: of the model; block 0 is written to.
        most_rows: of a step.
        most_logits: rows of logits.
    """
    if not is_canonical(decoder.norm.weight, decoder.numerics):
        return
    from paged.kernels import gemm_dispatch

    layout = BatchLayout.build([0], [1], [[0]], cache.block_size, cache.device)
    with gemm_dispatch.recorded() as products:
        hidden_TD = decoder(torch.zeros_like(layout.positions_T), layout, cache)
    with gemm_dispatch.recorded() as head_products:
        decoder.logits(hidden_TD)
    for asked, num_rows in ((products, most_rows), (head_products, most_logits)):
        gemm_dispatch.prepare(asked, decoder.dtype, cache.device, num_rows)
