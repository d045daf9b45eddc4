"""Executes plans with torch: keeps each slot's tokens, blocks and sampling state, runs the model and samples."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from paged.core.plan import SAMPLE, SCORE, Started, StepPlan, StepResult
from paged.core.request import Request, SamplingParams
from paged.kernels import vocab_parallel
from paged.kernels.attention import BatchLayout
from paged.kernels.linear import is_canonical
from paged.kernels.numerics import compute_dtype
from paged.kernels.sampling import (
    LogitBias,
    Penalties,
    SampledRows,
    SamplingColumns,
    sample,
    token_logprobs,
    top_logprobs,
)
from paged.model.checkpoint import update_decoder
from paged.model.decoder import Decoder
from paged.runner.kv_cache import KVCache
from paged.runner.payload import PromptScore, StepPayload, Stop, TopLogprobs
from paged.runner.text import TextStream, Tokenizer

# Rows of full-vocabulary logits that scoring a prompt holds at a time.
SCORE_ROWS = 64

UNTRUNCATED = SamplingParams(temperature=0)

LogitsObserver = Callable[[StepPlan, Sequence[int], torch.Tensor], None]


@dataclass(slots=True)
class _Slot:
    """What the runner remembers of the sequence in a slot."""

    request: Request
    stop_ids: frozenset[int]
    stream: TextStream | None = None
    counts: _TokenCounts | None = None

    @property
    def seed_bits(self) -> int:
        """The seed as the signed number with the same 64 bits, which is what torch can hold."""
        return self.request.seed if self.request.seed < 2**63 else self.request.seed - 2**64

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token and its log-probability are all that is wanted of the raw logits."""
        params = self.request.params
        return params.is_greedy and self.counts is None and not params.biases and params.logprobs is None


@dataclass(slots=True)
class _TokenCounts:
    """For penalties: how often the output holds each token (int32 [V]), and whether the prompt does (bool [V])."""

    output_V: torch.Tensor
    prompt_V: torch.Tensor


class TorchRunner:
    """An ``Executor`` that computes on one device, each plan as soon as it is submitted.

    Of a decoder that is cut over ranks every rank has a runner, and all are given the same plans. Rows of logits are
    gathered where their distribution is needed whole; for a plain greedy row or a score a few bytes are exchanged.

    Args:
        decoder: the network, or a rank's part of it, on its device.
        cache: the block pool's storage, on the same device.
        tokenizer: needed for stop texts only.
        max_num_seqs: slots.
        max_seq_len: most tokens of a sequence whose keys and values are held.
        eos_token_ids: tokens that end a sequence unless it ignores them.

    Attributes:
        observe_logits: called in every step with the plan, the plan rows that sample and their raw logits [R, V],
            which it must not change; for experiments and tests. Set on all ranks or on none.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        tokenizer: Tokenizer | None,
        *,
        max_num_seqs: int,
        max_seq_len: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.tokenizer = tokenizer
        self.device = cache.device
        self._eos = frozenset(eos_token_ids)
        self._slots: list[_Slot | None] = [None] * max_num_seqs
        # The last token sampled is stored, though never fed back.
        self._tokens = np.zeros((max_num_seqs, max_seq_len + 1), dtype=np.int64)
        self._blocks = np.zeros((max_num_seqs, -(-max_seq_len // cache.block_size)), dtype=np.int32)
        self._num_blocks = [0] * max_num_seqs
        self._results: deque[StepResult] = deque()
        self.observe_logits: LogitsObserver | None = None
        self.weight_version = 0

    @torch.inference_mode()
    def warm_up(self, max_step_tokens: int) -> None:
        """Run one token through everything, so that the first step does not pay for the libraries' first calls.

        On a card the library's products of up to ``max_step_tokens`` rows are compared with ours, which takes seconds
        the first time. Writes into block 0, which nobody can hold yet.
        """
        layout = BatchLayout.build([0], [1], [[0]], self.cache.block_size, self.device)
        token_T = torch.zeros(1, dtype=torch.int64, device=self.device)
        if is_canonical(self.decoder.norm.weight, self.decoder.numerics):
            from paged.kernels import gemm_dispatch

            with gemm_dispatch.recorded() as products:
                hidden_TD = self.decoder(token_T, layout, self.cache)
            with gemm_dispatch.recorded() as head_products:
                logits_RV = self.decoder.logits(hidden_TD)
            most_logits = max(len(self._slots), SCORE_ROWS)
            for asked, num_rows in ((products, max_step_tokens), (head_products, most_logits)):
                gemm_dispatch.prepare(asked, self.decoder.dtype, self.device, num_rows)
        else:
            logits_RV = self.decoder.logits(self.decoder(token_T, layout, self.cache))
        zero_R = torch.zeros(1, dtype=torch.int64, device=self.device)
        columns = SamplingColumns(temperature_R=zero_R.double() + 1, seeds_R=zero_R, positions_R=zero_R)
        sample(logits_RV, columns)

    def submit(self, plan: StepPlan) -> None:
        """Compute ``plan`` now; its result waits for ``collect``."""
        self._results.append(self._execute(plan))

    def collect(self) -> StepResult:
        """The oldest result."""
        return self._results.popleft()

    def load_weights(self, weights: Mapping[str, torch.Tensor] | Path | str) -> None:
        """Replace the weights, all or none; see ``paged.model.checkpoint.update_decoder``. No plan may be in flight."""
        assert not self._results, "collect what was submitted before the weights change"
        update_decoder(self.decoder, weights)
        self.weight_version += 1

    def abandon(self) -> None:
        """Forget results that were not collected, and all slots: later plans start sequences anew."""
        self._results.clear()
        self._slots = [None] * len(self._slots)

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult:
        start_s = time.perf_counter()
        assert plan.weight_version == self.weight_version, (plan.weight_version, self.weight_version)
        self._apply(plan)
        slots, starts, lengths = (np.asarray(column) for column in (plan.slots, plan.starts, plan.lengths))
        ends = np.cumsum(lengths)
        row_T = np.repeat(np.arange(len(slots)), lengths)
        position_T = starts[row_T] + np.arange(ends[-1]) - (ends - lengths)[row_T]
        token_ids_T = torch.from_numpy(self._tokens[slots[row_T], position_T]).to(self.device)
        blocks = self._blocks[slots, : max(self._num_blocks[slot] for slot in plan.slots)]
        layout = BatchLayout.build(plan.starts, plan.lengths, blocks, self.cache.block_size, self.device)
        hidden_TD = self.decoder(token_ids_T, layout, self.cache)

        sampled = [row for row, logits in enumerate(plan.logits) if logits & SAMPLE]
        # Every row counts, not only those that sample: a chunk of a prompt that is not finite must not be committed,
        # or its blocks are published. What goes wrong at one position reaches the last one of the chunk.
        last_BD = hidden_TD.index_select(0, layout.last_rows_B)
        nan_rows: list[int] = (~last_BD.isfinite().all(-1)).nonzero().flatten().tolist()
        scores = []
        for row, logits in enumerate(plan.logits):
            if logits & SCORE:
                first = int(ends[row] - lengths[row])
                scores.append(self._score(plan, row, hidden_TD[first : int(ends[row])], nan_rows))
        cut = self._cut_rows(plan, sampled)
        whole = sorted(set(range(len(sampled))).difference(cut))
        whole_rows = [sampled[index] for index in whole]
        logits_RV = self._logits(last_BD[whole_rows])
        if self.observe_logits is not None:
            self.observe_logits(plan, sampled, logits_RV)
        rows = self._sample(plan, whole_rows, logits_RV)
        tops = self._alternatives(plan, whole_rows, logits_RV)
        if cut:
            rows = self._with_cut_rows(rows, whole, last_BD[[sampled[index] for index in cut]], cut)
            tops = {whole[index]: top for index, top in tops.items()}
        return self._result(plan, sampled, rows, tops, scores, nan_rows, start_s)

    def _cut_rows(self, plan: StepPlan, sampled: Sequence[int]) -> list[int]:
        """Places in ``sampled`` of the rows that no rank needs to see whole: greedy, nothing to process or to list."""
        if self.decoder.group.size == 1 or self.observe_logits is not None:
            return []
        return [index for index, row in enumerate(sampled) if self._state(plan.slots[row]).is_plain]

    def _with_cut_rows(
        self, rows: SampledRows, places: Sequence[int], hidden_CD: torch.Tensor, cut: Sequence[int]
    ) -> SampledRows:
        """``rows``, which go to ``places``, joined with rows that are sampled from what each rank has of their logits.

        Args:
            rows: those sampled from whole rows.
            places: their places in the result.
            hidden_CD: final hidden states of the others.
            cut: the others' places in the result.
        """
        group, vocab_size = self.decoder.group, self.decoder.spec.vocab_size
        zero_C = torch.zeros(len(cut), dtype=torch.float64, device=self.device)
        logits_CL = self.decoder.local_logits(hidden_CD)
        own = vocab_parallel.sample_greedy(logits_CL, zero_C, vocab_size=vocab_size, group=group)
        order = torch.tensor([*places, *cut], device=self.device).argsort()

        def joined(whole: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
            return torch.cat((whole, own)).index_select(0, order)

        return SampledRows(
            joined(rows.tokens_R, own.tokens_R),
            joined(rows.logprobs_R, own.logprobs_R),
            joined(rows.behavior_logprobs_R, own.behavior_logprobs_R),
            joined(rows.nan_R, own.nan_R),
        )

    def _logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Logits of the rows that sample; a step in which every chunk ends before its text does has none."""
        if len(hidden_RD) == 0:
            return torch.empty(
                (0, self.decoder.spec.vocab_size), dtype=compute_dtype(hidden_RD.dtype), device=self.device
            )
        return self.decoder.logits(hidden_RD)

    def _apply(self, plan: StepPlan) -> None:
        """Bring the slots up to the plan."""
        for slot in plan.released:
            self._slots[slot] = None
        for started in plan.started:
            self._start(started)
        for slot, block in plan.appended:
            self._blocks[slot, self._num_blocks[slot]] = block
            self._num_blocks[slot] += 1

    def _start(self, started: Started) -> None:
        request, slot, output = started.request, started.slot, started.output_ids
        params = request.params
        tokens = _known(request) + output
        self._tokens[slot, : len(tokens)] = tokens
        self._blocks[slot, : len(started.blocks)] = started.blocks
        self._num_blocks[slot] = len(started.blocks)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        state = _Slot(request, stop_ids)
        if params.stop:
            assert self.tokenizer is not None, "stop texts need a tokenizer"
            state.stream = self.tokenizer.stream(params.stop)
            for token in output:
                state.stream.push(token)
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
            vocab_size = self.decoder.spec.vocab_size
            counts = np.bincount(np.asarray(output, dtype=np.int64), minlength=vocab_size).astype(np.int32)
            seen = np.bincount(np.asarray(_known(request)), minlength=vocab_size) > 0
            device = self.device
            state.counts = _TokenCounts(torch.from_numpy(counts).to(device), torch.from_numpy(seen).to(device))
        self._slots[slot] = state

    def _state(self, slot: int) -> _Slot:
        state = self._slots[slot]
        assert state is not None, f"slot {slot} is empty"
        return state

    def _sample(self, plan: StepPlan, rows: Sequence[int], logits_RV: torch.Tensor) -> SampledRows:
        """Draw the next token of the plan rows ``rows``, whose raw logits are given in the same order."""
        states = [self._state(plan.slots[row]) for row in rows]
        # Truncation keeps the likeliest token, so a greedy row has no use for it.
        params = [UNTRUNCATED if state.request.params.is_greedy else state.request.params for state in states]
        device = self.device

        def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        columns = SamplingColumns(
            temperature_R=column([p.temperature for p in params], torch.float64),
            seeds_R=column([state.seed_bits for state in states], torch.int64),
            positions_R=column([plan.starts[row] + plan.lengths[row] for row in rows], torch.int64),
            top_k_R=column([p.top_k for p in params], torch.int64) if any(p.top_k > 0 for p in params) else None,
            top_p_R=column([p.top_p for p in params], torch.float64) if any(p.top_p < 1 for p in params) else None,
            min_p_R=column([p.min_p for p in params], torch.float64) if any(p.min_p > 0 for p in params) else None,
            penalties=self._penalties(states),
            bias=self._bias(states),
        )
        return sample(logits_RV, columns)

    def _penalties(self, states: Sequence[_Slot]) -> Penalties | None:
        rows = [row for row, state in enumerate(states) if state.counts is not None]
        if not rows:
            return None
        params = [states[row].request.params for row in rows]
        counts = [counts for row in rows if (counts := states[row].counts) is not None]

        def column(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64, device=self.device)

        return Penalties(
            rows_P=torch.tensor(rows, device=self.device),
            repetition_P=column([p.repetition_penalty for p in params]),
            presence_P=column([p.presence_penalty for p in params]),
            frequency_P=column([p.frequency_penalty for p in params]),
            output_counts_PV=torch.stack([c.output_V for c in counts]),
            prompt_mask_PV=torch.stack([c.prompt_V for c in counts]),
        )

    def _bias(self, states: Sequence[_Slot]) -> LogitBias | None:
        triplets = [(row, *item) for row, s in enumerate(states) for item in s.request.params.biases]
        if not triplets:
            return None
        rows, ids, values = zip(*triplets, strict=True)
        return LogitBias(
            rows_N=torch.tensor(rows, device=self.device),
            token_ids_N=torch.tensor(ids, device=self.device),
            values_N=torch.tensor(values, dtype=torch.float64, device=self.device),
        )

    def _score(
        self, plan: StepPlan, row: int, hidden_CD: torch.Tensor, nan_rows: list[int]
    ) -> tuple[Request, int, list[PromptScore]]:
        """Score the prompt tokens that follow the positions of a chunk, whose final hidden states are given."""
        request = self._state(plan.slots[row]).request
        first = plan.starts[row] + 1
        targets = _known(request)[first : first + plan.lengths[row]]
        temperature, num_top = request.params.temperature, request.params.prompt_logprobs
        scores: list[PromptScore] = []
        for begin in range(0, len(targets), SCORE_ROWS):
            ids = targets[begin : begin + SCORE_ROWS]
            hidden_RD = hidden_CD[begin : begin + len(ids)]
            temperature_R = torch.full((len(ids),), temperature, dtype=torch.float64, device=self.device)
            ids_R = torch.tensor(ids, device=self.device)
            tops: Sequence[TopLogprobs] = [([], [])] * len(ids)
            if not num_top and self.decoder.group.size > 1:
                vocab_size, group = self.decoder.spec.vocab_size, self.decoder.group
                logits_RL = self.decoder.local_logits(hidden_RD)
                logprobs_R = vocab_parallel.token_logprobs(
                    logits_RL, temperature_R, ids_R, vocab_size=vocab_size, group=group
                )
            else:
                logits_RV = self.decoder.logits(hidden_RD)
                logprobs_R = token_logprobs(logits_RV, temperature_R, ids_R)
            logprobs = logprobs_R.tolist()
            if num_top:
                top_ids, top_values = top_logprobs(logits_RV, temperature_R, num_top)
                tops = list(zip(top_ids.tolist(), top_values.tolist(), strict=True))
            if any(logprob != logprob for logprob in logprobs):
                nan_rows.append(row)
            scores += [PromptScore(*score) for score in zip(ids, logprobs, tops, strict=True)]
        return request, first, scores

    def _result(
        self,
        plan: StepPlan,
        sampled: Sequence[int],
        rows: SampledRows,
        tops: dict[int, TopLogprobs],
        scores: list[tuple[Request, int, list[PromptScore]]],
        nan_rows: list[int],
        start_s: float,
    ) -> StepResult:
        """Bring the sampled rows to the host, store their tokens and see who stops."""
        tokens: list[int] = rows.tokens_R.tolist()
        stops: dict[int, Stop] = {}
        for index, (row, token) in enumerate(zip(sampled, tokens, strict=True)):
            slot = plan.slots[row]
            state = self._state(slot)
            self._tokens[slot, plan.starts[row] + plan.lengths[row]] = token
            if state.counts is not None:
                state.counts.output_V[token] += 1
            if state.request.output_len is not None:
                if _ends_here(state.request, plan.starts[row] + plan.lengths[row] + 1):
                    stops[index] = Stop(None, is_token=False)
            elif token in state.stop_ids:
                asked = token in state.request.params.stop_token_ids
                stops[index] = Stop(token if asked else None, is_token=True)
            elif state.stream is not None and state.stream.push(token):
                stops[index] = Stop(state.stream.stopped_by, is_token=False)
        nan_rows += [row for row, is_nan in zip(sampled, rows.nan_R.tolist(), strict=True) if is_nan]
        payload = StepPayload(
            tokens=tokens,
            logprobs=rows.logprobs_R.tolist(),
            behavior_logprobs=rows.behavior_logprobs_R.tolist(),
            top_logprobs=tops,
            stops=stops,
            scores=scores,
        )
        stopped = [index in stops for index in range(len(tokens))]
        end_s = time.perf_counter()
        return StepResult(plan.step, tokens, stopped, sorted(set(nan_rows)), start_s, end_s, payload)

    def _alternatives(self, plan: StepPlan, rows: Sequence[int], logits_RV: torch.Tensor) -> dict[int, TopLogprobs]:
        """The most likely tokens of those rows that ask for them, by index into ``rows``."""
        params = [self._state(plan.slots[row]).request.params for row in rows]
        wanted = [index for index, p in enumerate(params) if p.logprobs is not None]
        if not wanted:
            return {}
        counts = [params[index].logprobs or 0 for index in wanted]
        temperatures = [params[index].temperature for index in wanted]
        temperature_R = torch.tensor(temperatures, dtype=torch.float64, device=self.device)
        chosen_RV = logits_RV.index_select(0, torch.tensor(wanted, device=self.device))
        ids_RK, values_RK = top_logprobs(chosen_RV, temperature_R, max(counts))
        found = zip(wanted, counts, ids_RK.tolist(), values_RK.tolist(), strict=True)
        return {index: (ids[:count], values[:count]) for index, count, ids, values in found}


def _ends_here(request: Request, num_tokens: int) -> bool:
    """Whether a request of a given output length ends now that it has ``num_tokens`` tokens, prompt included."""
    assert request.output_len is not None
    return num_tokens - len(request.prompt) == request.output_len < request.max_tokens


def _known(request: Request) -> tuple[int, ...]:
    """The prompt's tokens; only a simulation knows none."""
    assert request.prompt.token_ids is not None, f"request {request.id!r} has no tokens to compute"
    return request.prompt.token_ids
