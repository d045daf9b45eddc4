"""What ranks exchange: gathers and sums over a group, every rank getting the same bits.

Contract: a sum's order hangs on the number of ranks alone, never on the size or the shape of what is summed: each
element is the balanced tree over the ranks, ((0 + 1) + (2 + 3)). A row's sum is then the same whatever rows go with it.
One call is one collective, however many rows it carries. For inference only.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from paged.kernels.numerics import fold_tree
from paged.kernels.peer_memory import PeerMemory

# torch 2.14 has another name for it and warns of the old one.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class RankGroup:
    """The ranks that share a model, as one of them sees them.

    All ranks call the same operations in the same order, with the same shapes and dtypes. A group of one rank issues
    nothing and gives back what it gets. Leaving it as a context closes it; other ranks count as lost if that is by an
    exception.

    Args:
        rank: this rank, 0 to ``size - 1``.
        size: number of ranks.
        process_group: what carries the tensors: gloo for those on the CPU, NCCL for those on a card. The caller keeps
            and ends it; its time limit holds.
        memory: what carries the tensors on cards in its place: memory that all ranks write to. Ends with ``close``.

    Attributes:
        num_collectives: collectives issued so far.
        num_bytes: bytes that this rank has contributed to them.
        is_exchanging: whether a gather is going on; another thread may look.

    Raises:
        ValueError: ranks that can't be.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        process_group: dist.ProcessGroup | None = None,
        memory: PeerMemory | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be 0 to {size - 1} (size - 1), not {rank}")
        if (process_group is not None) + (memory is not None) != (size > 1):
            raise ValueError(
                f"process_group or memory must carry the tensors of several ranks, and neither those of one, not "
                f"{process_group} and {memory}"
            )
        self.rank = rank
        self.size = size
        self.process_group = process_group
        self.memory = memory
        self.num_collectives = 0
        self.num_bytes = 0
        self.is_exchanging = False

    @property
    def fits_graphs(self) -> bool:
        """Whether what the ranks exchange can be part of CUDA graphs."""
        return self.process_group is None

    def abort(self) -> None:
        """Let nothing on a card wait for other ranks any more, for good; any thread may call it."""
        if self.memory is not None:
            self.memory.stop()
        elif self.process_group is not None:
            self.process_group.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(is_lost=kind is not None)

    def close(self, *, is_lost: bool = False) -> None:
        """Give memory that is shared with other ranks back once this rank's work is done. May be called again.

        Args:
            is_lost: whether other ranks may be gone, so that nothing is waited for any more.
        """
        if self.memory is not None:
            if is_lost:
                self.memory.stop()
            self.memory.close()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, formed in the dtype of ``x``.

        Raises:
            ValueError: ``x`` requires grad.
        """
        if self.size == 1:
            return x
        x = self._take(x)
        if self.memory is not None and x.numel():
            # Imported here because a CPU needs no Triton.
            from paged.kernels import peers_triton

            if x.dtype in peers_triton.SUMMED_DTYPES:
                return peers_triton.all_reduce(x, self.memory)
        elif self.memory is None and x.is_cuda and self.size == 2:
            # Two operands commute, so the order that the library takes leaves the bits alone.
            total = x.clone()
            dist.all_reduce(total, group=self.process_group)
            return total
        return fold_tree(self._gather(x[None], 0).unbind(0))

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Every rank's ``x``, concatenated along ``dim`` in the order of the ranks.

        Raises:
            ValueError: ``x`` requires grad.
        """
        if self.size == 1:
            return x
        return self._gather(self._take(x), dim)

    def _take(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            raise ValueError("a tensor that requires grad can't be exchanged: tensor parallelism is for inference only")
        self.num_collectives += 1
        self.num_bytes += x.numel() * x.element_size()
        return x.contiguous()

    def _gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Every rank's ``x`` along ``dim``; the wire sees bytes, so that every dtype travels."""
        if self.memory is not None and x.numel():
            from paged.kernels import peers_triton

            return peers_triton.all_gather(x, dim, self.memory)
        gathered = x.new_empty((self.size, *x.shape))
        if x.numel():
            wire = gathered.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8)
            self.is_exchanging = True
            try:
                _all_gather_single(*wire, group=self.process_group)
            finally:
                self.is_exchanging = False
        return gathered.flatten(0, 1) if dim == 0 else torch.cat(gathered.unbind(0), dim=dim)


SINGLE = RankGroup()
"""The group of one rank."""
