"""What ranks exchange: gathers and sums over a group, every rank getting the same bits.

Contract: a sum's order hangs on the number of ranks alone, never on the size or the shape of what is summed: each
element is the balanced tree over the ranks, ((0 + 1) + (2 + 3)). A row's sum is then the same whatever rows go with it.
One call is one collective, however many rows it carries. For inference only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from paged.kernels.numerics import fold_tree

# torch 2.14 has another name for it and warns of the old one.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class RankGroup:
    """The ranks that share a model, as one of them sees them.

    All ranks call the same operations in the same order, with the same shapes and dtypes. A group of one rank issues
    nothing and gives back what it gets.

    Args:
        rank: this rank, 0 to ``size - 1``.
        size: number of ranks.
        process_group: what carries the tensors: gloo for those on the CPU, NCCL for those on a card. ``None`` for one
            rank. The caller keeps and ends it; its time limit holds.

    Attributes:
        num_collectives: collectives issued so far.
        num_bytes: bytes that this rank has contributed to them.
        is_exchanging: whether a gather is going on; another thread may look.

    Raises:
        ValueError: ranks that can't be.
    """

    def __init__(self, rank: int = 0, size: int = 1, process_group: dist.ProcessGroup | None = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be 0 to {size - 1} (size - 1), not {rank}")
        if (process_group is None) != (size == 1):
            raise ValueError(f"process_group must be None for one rank and a group otherwise, not {process_group}")
        self.rank = rank
        self.size = size
        self.process_group = process_group
        self.num_collectives = 0
        self.num_bytes = 0
        self.is_exchanging = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, formed in the dtype of ``x``.

        Raises:
            ValueError: ``x`` requires grad.
        """
        if self.size == 1:
            return x
        x = self._take(x)
        if x.is_cuda and self.size == 2:
            # Two operands commute, so the order that the library takes leaves the bits alone.
            total = x.clone()
            dist.all_reduce(total, group=self.process_group)
            return total
        return fold_tree(self._gather(x).unbind(0))

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Every rank's ``x``, concatenated along ``dim`` in the order of the ranks.

        Raises:
            ValueError: ``x`` requires grad.
        """
        if self.size == 1:
            return x
        return torch.cat(self._gather(self._take(x)).unbind(0), dim=dim)

    def _take(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            raise ValueError("a tensor that requires grad can't be exchanged: tensor parallelism is for inference only")
        self.num_collectives += 1
        self.num_bytes += x.numel() * x.element_size()
        return x.contiguous()

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]; the wire sees bytes, so that every dtype travels."""
        gathered = x.new_empty((self.size, *x.shape))
        if x.numel():
            wire = gathered.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8)
            self.is_exchanging = True
            try:
                _all_gather_single(*wire, group=self.process_group)
            finally:
                self.is_exchanging = False
        return gathered


SINGLE = RankGroup()
"""The group of one rank."""
