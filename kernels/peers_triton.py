"""Sums and gathers over ranks that write into each other's memory: kernels that need no library and fit into graphs.

Contract: that of ``paged.kernels.collectives``. Each element of a sum is the balanced tree over the ranks,
((0 + 1) + (2 + 3)), rounded to its dtype after each addition, whatever the number of elements and the way they travel;
a gather moves bits. For 2, 4 or 8 ranks. All ranks launch the same operations on the same sizes, in one order.

Every rank has a buffer (see ``paged.kernels.peer_memory``) that all ranks can write to. Elements travel as words of 8
bytes, in one of three ways:

* **Marked** (few words): each word goes to every rank together with the number of the exchange, the epoch, in one store
  of 16 bytes, which can't be torn. Whoever waits for a word reads it until the epoch is the right one.
* **Whole** (gathers, and sums of two ranks): each rank writes all of its words to the others, then raises a flag there.
* **Split** (sums of more ranks): each rank gets everybody's words of its own share, sums them, and writes the sums to
  all; a flag follows each of the two.

Program i of a rank works with the programs i of the others alone, so programs need not run at the same time.

**Why nobody overwrites what is still read.** A buffer has two halves; epoch e uses half e mod 2. Let rank A write to
rank B in epoch e, into the half that B read in epoch e - 2. A's kernel of epoch e begins to write when its kernel of
e - 1 is complete: that is the stream's order, which ``gdc_wait`` restores for dependent launches. In e - 1 every
program of A waited for something that B sent in e - 1. B began to send in e - 1 when its kernel of e - 2 was complete,
and so had read all that it would. A flag holds the epoch and only grows: a rank that is an epoch ahead may have raised
it further than is waited for, which does as well. Marks are compared for equality: what lies there is of an earlier
epoch, and 63 bits do not come again.

The epoch is counted on the device, so that graphs can be replayed. Each program finds it in a counter of its number,
and advances all counters that fall to it in this launch; so every program of the next launch, whatever its grid, finds
the same number.

**Why a wait ends.** Every so often a word in the host's memory is looked at. Once it is not 0, nothing is waited for
any more, and what has not come counts as 0: what is computed from it then means nothing, but is a number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paged.kernels.launch import is_dependent, launch
from paged.kernels.peer_memory import BULK_OFFSET, FLAG_OFFSET, HALF_WORDS, MARKED_WORDS, NUM_COUNTERS, PeerMemory

WORD_BYTES = 8

# What numbers a word is made of: how many bits each has, and what they are. Bits that are only moved are whole words.
_KINDS = {
    torch.float16: (16, tl.float16),
    torch.bfloat16: (16, tl.bfloat16),
    torch.float32: (32, tl.float32),
    torch.float64: (64, tl.float64),
    torch.int32: (32, tl.int32),
    torch.int64: (64, tl.int64),
}
SUMMED_DTYPES = frozenset(_KINDS)
"""What ``all_reduce`` takes; anything can be gathered."""

_MARKED_BLOCK, _MARKED_WARPS = 256, 8
_BULK_BLOCK, _BULK_WARPS, _MOST_BULK_PROGRAMS = 2048, 16, 64
# Shares begin at multiples of so many words, so that they are read several words at a time.
_SHARE_WORDS = 16


def all_reduce(x: torch.Tensor, memory: PeerMemory) -> torch.Tensor:
    """The sum over the ranks of ``x``, contiguous, formed in its dtype."""
    bits, kind = _KINDS[x.dtype]
    x_words, size = _as_words(x), memory.size
    num_words = x_words.numel()
    out_words = torch.empty_like(x_words)
    if num_words <= MARKED_WORDS // size:
        _launch_marked(x_words, out_words, num_words, bits, kind, memory)
        return _as_numbers(out_words, x)
    # As many as the others' buffers have room for.
    for begin in range(0, num_words, HALF_WORDS // 2):
        chunk = slice(begin, begin + HALF_WORDS // 2)
        count = x_words[chunk].numel()
        if size == 2:
            _launch_bulk(_whole_kernel, x_words[chunk], out_words[chunk], count, (count, 0), bits, kind, memory)
        else:
            share_words = triton.cdiv(count, size * _SHARE_WORDS) * _SHARE_WORDS
            split = (share_words,)
            _launch_bulk(_split_kernel, x_words[chunk], out_words[chunk], share_words, split, bits, kind, memory)
    return _as_numbers(out_words, x)


def all_gather(x: torch.Tensor, dim: int, memory: PeerMemory) -> torch.Tensor:
    """Every rank's ``x``, contiguous, concatenated along ``dim`` in the order of the ranks."""
    size, dim = memory.size, dim % x.dim()
    row_bytes = x[(0,) * dim].numel() * x.element_size() if x.numel() else 0
    if row_bytes % WORD_BYTES:
        parts = all_gather(_as_words(x)[None], 0, memory)
        return torch.cat([_as_numbers(part, x) for part in parts], dim)
    x_words = _as_words(x)
    num_words, row_words = x_words.numel(), row_bytes // WORD_BYTES
    out = x.new_empty(*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :])
    out_words = out.view(-1).view(torch.int64)
    if num_words <= MARKED_WORDS // size:
        _launch_marked(x_words, out_words, row_words, 0, None, memory)
        return out
    for begin in range(0, num_words, HALF_WORDS // size):
        chunk = x_words[begin : begin + HALF_WORDS // size]
        _launch_bulk(_whole_kernel, chunk, out_words, chunk.numel(), (row_words, begin), 0, None, memory)
    return out


def _as_words(x: torch.Tensor) -> torch.Tensor:
    """The bits of a contiguous tensor as words, int64, the last one padded; a copy if need be."""
    num_bytes = x.numel() * x.element_size()
    if x.data_ptr() % 16 == 0 and num_bytes % WORD_BYTES == 0:
        return x.view(-1).view(torch.int64)
    words = torch.zeros(triton.cdiv(num_bytes, WORD_BYTES), dtype=torch.int64, device=x.device)
    words.view(torch.uint8)[:num_bytes].copy_(x.view(-1).view(torch.uint8))
    return words


def _as_numbers(words: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The other way round."""
    return words.view(like.dtype)[: like.numel()].view(like.shape)


def _launch_marked(
    x_words: torch.Tensor,
    out_words: torch.Tensor,
    row_words: int,
    bits: int,
    kind: tl.dtype | None,
    memory: PeerMemory,
) -> None:
    num_words = x_words.numel()
    launch(
        _marked_kernel,
        (min(memory.most_programs, triton.cdiv(num_words, _MARKED_BLOCK)),),
        x_words,
        out_words,
        memory.peers,
        memory.counters,
        memory.stop_address,
        memory.own,
        memory.rank,
        num_words,
        row_words,
        BITS=bits,
        KIND=kind,
        SIZE=memory.size,
        BLOCK=_MARKED_BLOCK,
        MOST_WORDS=MARKED_WORDS // memory.size,
        NUM_COUNTERS=NUM_COUNTERS,
        IS_DEPENDENT=is_dependent(x_words),
        num_warps=_MARKED_WARPS,
        on=x_words,
    )


def _launch_bulk(
    kernel: triton.JITFunction,
    x_words: torch.Tensor,
    out_words: torch.Tensor,
    program_words: int,
    places: tuple[int, ...],
    bits: int,
    kind: tl.dtype | None,
    memory: PeerMemory,
) -> None:
    """Launch a kernel whose programs share ``program_words`` words; ``places`` are the numbers that it alone takes."""
    most_programs = min(memory.most_programs, _MOST_BULK_PROGRAMS)
    launch(
        kernel,
        (min(most_programs, triton.cdiv(program_words, _BULK_BLOCK)),),
        x_words,
        out_words,
        memory.peers,
        memory.counters,
        memory.stop_address,
        memory.own,
        memory.rank,
        x_words.numel(),
        *places,
        BULK_OFFSET,
        FLAG_OFFSET,
        BITS=bits,
        KIND=kind,
        SIZE=memory.size,
        BLOCK=_BULK_BLOCK,
        THREADS=32 * _BULK_WARPS,
        HALF_WORDS=HALF_WORDS,
        NUM_COUNTERS=NUM_COUNTERS,
        IS_DEPENDENT=is_dependent(x_words),
        num_warps=_BULK_WARPS,
        on=x_words,
    )


@triton.jit
def _send_marked(address, word, epoch, is_wanted):
    """Store words with the epoch beside them, 16 bytes at once."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .b128 both;
        .reg .pred is_sent;
        setp.ne.s32 is_sent, $4, 0;
        mov.b128 both, {$2, $3};
        @is_sent st.relaxed.sys.global.b128 [$1], both;
        mov.b32 $0, 0;
        }
        """,
        "=r,l,l,l,r",
        args=[address, word, epoch, is_wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.constexpr_function
def _receiving(size):
    """Instructions that read ``size`` marked words, a stride apart, until all have come."""
    places = range(size)
    address, stride, epoch, stop, is_wanted = (f"${size + number}" for number in range(5))
    lines = [
        f".reg .b128 both<{size}>;",
        f".reg .b64 place, word<{size}>, mark<{size}>;",
        ".reg .b32 tries, now;",
        ".reg .pred is_done;",
        "mov.b32 tries, 0;",
        *(f"mov.b64 word{i}, 0;" for i in places),
        f"setp.eq.s32 is_done, {is_wanted}, 0;",
        "@is_done bra end;",
        "again:",
        # All are on their way before the first is looked at.
        f"mov.b64 place, {address};",
        *(f"ld.relaxed.sys.global.b128 both{i}, [place]; add.s64 place, place, {stride};" for i in places),
        *(f"mov.b128 {{word{i}, mark{i}}}, both{i};" for i in places),
        f"setp.eq.s64 is_done, mark0, {epoch};",
        *(f"setp.eq.and.s64 is_done, mark{i}, {epoch}, is_done;" for i in places[1:]),
        "@is_done bra end;",
        "add.s32 tries, tries, 1;",
        "and.b32 now, tries, 255;",
        "setp.ne.s32 is_done, now, 0;",
        "@is_done bra again;",
        f"ld.relaxed.sys.global.b32 now, [{stop}];",
        "setp.eq.s32 is_done, now, 0;",
        "@is_done bra again;",
        # What has not come counts as 0.
        *(f"setp.eq.s64 is_done, mark{i}, {epoch}; selp.b64 word{i}, word{i}, 0, is_done;" for i in places),
        "end:",
        *(f"mov.b64 ${i}, word{i};" for i in places),
    ]
    return "\n".join(("{", *lines, "}"))


@triton.constexpr_function
def _receiving_operands(size):
    """Constraints of these instructions: the words, then address, stride, epoch, where to look for a stop, a flag."""
    return ",".join(["=&l"] * size + ["l", "l", "l", "l", "r"])


@triton.jit
def _receive_marked(address, stride, epoch, stop, is_wanted, SIZE: tl.constexpr):
    """The words of all ranks that come with the epoch; 0 where none is wanted, or none is waited for any more."""
    text: tl.constexpr = _receiving(SIZE)
    operands: tl.constexpr = _receiving_operands(SIZE)
    if SIZE == 2:
        words = tl.inline_asm_elementwise(
            text, operands, [address, stride, epoch, stop, is_wanted], (tl.int64, tl.int64), is_pure=False, pack=1
        )
    elif SIZE == 4:
        words = tl.inline_asm_elementwise(
            text,
            operands,
            [address, stride, epoch, stop, is_wanted],
            (tl.int64, tl.int64, tl.int64, tl.int64),
            is_pure=False,
            pack=1,
        )
    else:
        tl.static_assert(SIZE == 8)
        words = tl.inline_asm_elementwise(
            text,
            operands,
            [address, stride, epoch, stop, is_wanted],
            (tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64, tl.int64),
            is_pure=False,
            pack=1,
        )
    return words


@triton.jit
def _raise_flags(address, epoch, is_wanted):
    """Set flags once all that this program has written before can be seen; one thread a flag."""
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred is_mine;
        setp.ne.s32 is_mine, $3, 0;
        @is_mine st.release.sys.global.b64 [$1], $2;
        mov.b32 $0, 0;
        }
        """,
        "=r,l,l,r",
        args=[address, epoch, is_wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _await_flags(address, epoch, stop, is_wanted):
    """Wait until flags have reached the epoch; what was written before they were set can be read afterwards.

    Whether all have: otherwise none is waited for any more.
    """
    was_stopped = tl.inline_asm_elementwise(
        """
        {
        .reg .b64 flag;
        .reg .pred is_done, is_early;
        .reg .b32 tries, now;
        mov.b32 tries, 0;
        mov.b32 now, 0;
        setp.eq.s32 is_done, $4, 0;
        @is_done bra end;
        again:
        ld.acquire.sys.global.b64 flag, [$1];
        setp.ge.s64 is_done, flag, $2;
        mov.b32 now, 0;
        @is_done bra end;
        add.s32 tries, tries, 1;
        and.b32 now, tries, 255;
        setp.ne.s32 is_early, now, 0;
        @is_early bra again;
        ld.relaxed.sys.global.b32 now, [$3];
        setp.eq.s32 is_early, now, 0;
        @is_early bra again;
        end:
        mov.b32 $0, now;
        }
        """,
        "=r,l,l,l,r",
        args=[address, epoch, stop, is_wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    # All threads meet here.
    return tl.max(was_stopped, 0) == 0


@triton.jit
def _added(left, right, BITS: tl.constexpr, KIND: tl.constexpr):
    """Sums of the numbers in two words, each rounded to their dtype."""
    if BITS == 64:
        total = (left.to(KIND, bitcast=True) + right.to(KIND, bitcast=True)).to(tl.int64, bitcast=True)
    else:
        bits: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
        unsigned: tl.constexpr = tl.uint16 if BITS == 16 else tl.uint32
        wide: tl.constexpr = KIND if tl.int32 == KIND else tl.float32
        total = tl.zeros_like(left)
        for place in tl.static_range(64 // BITS):
            left_number = (left >> (place * BITS)).to(bits).to(KIND, bitcast=True).to(wide)
            right_number = (right >> (place * BITS)).to(bits).to(KIND, bitcast=True).to(wide)
            number = (left_number + right_number).to(KIND).to(unsigned, bitcast=True)
            total = total | (number.to(tl.int64) << (place * BITS))
    return total


@triton.jit
def _folded(words, FIRST: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr):
    """The balanced tree over COUNT ranks' words: neighbours first."""
    if COUNT == 1:
        total = words[FIRST]
    else:
        left = _folded(words, FIRST, COUNT // 2, BITS, KIND)
        total = _added(left, _folded(words, FIRST + COUNT // 2, COUNT // 2, BITS, KIND), BITS, KIND)
    return total


@triton.jit
def _words_at(address):
    """A pointer to words at an address; all parts of buffers begin at multiples of 16."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def _advance(counter_pointer, epoch, NUM_COUNTERS: tl.constexpr):
    """Leave the epoch in all counters that are this program's in this launch."""
    # Threads that wait for different words do not wait for each other: the last may have yet to read the counter.
    tl.debug_barrier()
    index_N = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, NUM_COUNTERS)
    tl.store(counter_pointer + index_N, epoch, mask=index_N < NUM_COUNTERS)


@triton.jit
def _gathered_place(word, source, row_words, SIZE: tl.constexpr):
    """Where a rank's words of rows go: rows of all ranks are joined."""
    return (word // row_words).to(tl.int64) * (SIZE * row_words) + source * row_words + word % row_words


@triton.jit(do_not_specialize=["rank", "num_words", "row_words"])
def _marked_kernel(
    x_pointer,
    out_pointer,
    peer_pointer,
    counter_pointer,
    stop,
    own,
    rank,
    num_words,
    row_words,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST_WORDS: tl.constexpr,
    NUM_COUNTERS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Sum (or gather, for BITS 0) words that travel with their epoch."""
    # Everything that must come before words can go is on its way at once. Others' memory is the farthest.
    peers = ()
    for step in tl.static_range(SIZE):
        peers = peers + (tl.load(peer_pointer + (rank + 1 + step) % SIZE),)  # type: ignore[assignment]  # noqa: RUF005
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    word_B = program * BLOCK + tl.arange(0, BLOCK)
    x_B = tl.load(x_pointer + word_B, mask=word_B < num_words, other=0)
    epoch = tl.load(counter_pointer + program) + 1
    half = (epoch % 2) * (SIZE * MOST_WORDS * 16)
    for _ in range(program * BLOCK, num_words, num_programs * BLOCK):
        is_word_B = word_B < num_words
        for step in tl.static_range(SIZE):
            # What nobody waits for is not sent: it could come when the buffer is another engine's.
            place_B = peers[step] + half + (rank * MOST_WORDS + word_B) * 16
            _send_marked(place_B, x_B, epoch, is_word_B.to(tl.int32))
        word_B += num_programs * BLOCK
        x_B = tl.load(x_pointer + word_B, mask=word_B < num_words, other=0)
    for first in range(program * BLOCK, num_words, num_programs * BLOCK):
        word_B = first + tl.arange(0, BLOCK)
        is_word_B = word_B < num_words
        place_B = own + half + word_B * 16
        words = _receive_marked(place_B, MOST_WORDS * 16, epoch, stop, is_word_B.to(tl.int32), SIZE)
        if BITS == 0:
            for source in tl.static_range(SIZE):
                out_B = _gathered_place(word_B, source, row_words, SIZE)
                tl.store(out_pointer + out_B, words[source], mask=is_word_B)
        else:
            tl.store(out_pointer + word_B, _folded(words, 0, SIZE, BITS, KIND), mask=is_word_B)
    _advance(counter_pointer, epoch, NUM_COUNTERS)


@triton.jit
def _flag_places(base, offset, phase, program, source, SIZE: tl.constexpr, NUM_COUNTERS: tl.constexpr):
    """Addresses of the flags that programs with one number raise for each other."""
    return base + offset + ((phase * NUM_COUNTERS + program) * SIZE + source) * 8


@triton.jit
def _meet(
    lane_peer_N, own, offset, phase: tl.constexpr, rank, epoch, stop, SIZE: tl.constexpr, THREADS: tl.constexpr,
    NUM_COUNTERS: tl.constexpr,
):  # fmt: skip
    """Tell the peers' programs of this number that what was sent to them can be read, and wait for theirs.

    Whether all have come. ``lane_peer_N`` has the address of peer n's buffer in lane n.
    """
    program, lane_N = tl.program_id(0), tl.arange(0, THREADS)
    is_peer_N = (lane_N < SIZE).to(tl.int32)
    _raise_flags(_flag_places(lane_peer_N, offset, phase, program, rank, SIZE, NUM_COUNTERS), epoch, is_peer_N)
    return _await_flags(_flag_places(own, offset, phase, program, lane_N, SIZE, NUM_COUNTERS), epoch, stop, is_peer_N)


@triton.jit(do_not_specialize=["rank"])
def _whole_kernel(
    x_pointer,
    out_pointer,
    peer_pointer,
    counter_pointer,
    stop,
    own,
    rank,
    num_words,
    row_words,
    begin,
    bulk_offset,
    flag_offset,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    HALF_WORDS: tl.constexpr,
    NUM_COUNTERS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Sum words of two ranks, or gather (BITS 0) those of any number, which are written to all others at once."""
    lane_N = tl.arange(0, THREADS)
    lane_peer_N = tl.load(peer_pointer + lane_N, mask=lane_N < SIZE, other=0)
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(counter_pointer + program) + 1
    part_words: tl.constexpr = HALF_WORDS // SIZE
    half = bulk_offset + (epoch % 2) * (HALF_WORDS * 8)
    for step in range(1, SIZE):
        peer = tl.load(peer_pointer + (rank + step) % SIZE)
        inbox = _words_at(peer + half + rank * (part_words * 8))
        for first in range(program * BLOCK, num_words, num_programs * BLOCK):
            word_B = first + tl.arange(0, BLOCK)
            mask_B = word_B < num_words
            x_B = tl.load(x_pointer + word_B, mask=mask_B)
            tl.store(inbox + word_B, x_B, mask=mask_B)
            if BITS == 0 and step == 1:
                tl.store(out_pointer + _gathered_place(begin + word_B, rank, row_words, SIZE), x_B, mask=mask_B)
    have_come = _meet(lane_peer_N, own, flag_offset, 0, rank, epoch, stop, SIZE, THREADS, NUM_COUNTERS)
    for step in range(1, SIZE):
        source = (rank + step) % SIZE
        inbox = _words_at(own + half + source * (part_words * 8))
        for first in range(program * BLOCK, num_words, num_programs * BLOCK):
            word_B = first + tl.arange(0, BLOCK)
            mask_B = word_B < num_words
            came_B = tl.load(inbox + word_B, mask=mask_B & have_come, other=0, cache_modifier=".cg")
            if BITS == 0:
                tl.store(out_pointer + _gathered_place(begin + word_B, source, row_words, SIZE), came_B, mask=mask_B)
            else:
                # Of two operands the order leaves the bits alone.
                total_B = _added(tl.load(x_pointer + word_B, mask=mask_B), came_B, BITS, KIND)
                tl.store(out_pointer + word_B, total_B, mask=mask_B)
    _advance(counter_pointer, epoch, NUM_COUNTERS)


@triton.jit
def _sum_of_parts(inbox, word_B, mask_B, PART: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
                  BITS: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """The balanced tree over COUNT ranks' words of one share."""
    if COUNT == 1:
        total_B = tl.load(inbox + FIRST * PART + word_B, mask=mask_B, other=0, cache_modifier=".cg")
    else:
        left_B = _sum_of_parts(inbox, word_B, mask_B, PART, FIRST, COUNT // 2, BITS, KIND)
        right_B = _sum_of_parts(inbox, word_B, mask_B, PART, FIRST + COUNT // 2, COUNT // 2, BITS, KIND)
        total_B = _added(left_B, right_B, BITS, KIND)
    return total_B


@triton.jit(do_not_specialize=["rank"])
def _split_kernel(
    x_pointer,
    out_pointer,
    peer_pointer,
    counter_pointer,
    stop,
    own,
    rank,
    num_words,
    share_words,
    bulk_offset,
    flag_offset,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    HALF_WORDS: tl.constexpr,
    NUM_COUNTERS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Sum words, of which each rank sums a share for all."""
    lane_N = tl.arange(0, THREADS)
    lane_peer_N = tl.load(peer_pointer + lane_N, mask=lane_N < SIZE, other=0)
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(counter_pointer + program) + 1
    part_words: tl.constexpr = HALF_WORDS // (2 * SIZE)
    half = bulk_offset + (epoch % 2) * (HALF_WORDS * 8)
    sums = half + HALF_WORDS * 4
    for step in range(SIZE):
        owner = (rank + step) % SIZE
        peer = tl.load(peer_pointer + owner)
        inbox = _words_at(peer + half + rank * (part_words * 8))
        share = owner * share_words
        for first in range(program * BLOCK, share_words, num_programs * BLOCK):
            word_B = first + tl.arange(0, BLOCK)
            mask_B = (word_B < share_words) & (share + word_B < num_words)
            x_B = tl.load(x_pointer + share + word_B, mask=mask_B)
            tl.store(inbox + word_B, x_B, mask=mask_B)
    have_come = _meet(lane_peer_N, own, flag_offset, 0, rank, epoch, stop, SIZE, THREADS, NUM_COUNTERS)
    inbox = _words_at(own + half)
    for first in range(program * BLOCK, share_words, num_programs * BLOCK):
        word_B = first + tl.arange(0, BLOCK)
        mask_B = (word_B < share_words) & (rank * share_words + word_B < num_words)
        total_B = _sum_of_parts(inbox, word_B, mask_B & have_come, part_words, 0, SIZE, BITS, KIND)
        for step in range(SIZE):
            peer = tl.load(peer_pointer + (rank + step) % SIZE)
            outbox = _words_at(peer + sums + rank * (part_words * 8))
            tl.store(outbox + word_B, total_B, mask=mask_B)
    have_come = _meet(lane_peer_N, own, flag_offset, 1, rank, epoch, stop, SIZE, THREADS, NUM_COUNTERS)
    for step in range(SIZE):
        owner = (rank + step) % SIZE
        outbox = _words_at(own + sums + owner * (part_words * 8))
        share = owner * share_words
        for first in range(program * BLOCK, share_words, num_programs * BLOCK):
            word_B = first + tl.arange(0, BLOCK)
            mask_B = (word_B < share_words) & (share + word_B < num_words)
            total_B = tl.load(outbox + word_B, mask=mask_B & have_come, other=0, cache_modifier=".cg")
            tl.store(out_pointer + share + word_B, total_B, mask=mask_B)
    _advance(counter_pointer, epoch, NUM_COUNTERS)
