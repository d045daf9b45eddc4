"""Executes plans with torch: brings the slots up to each, runs the model, samples, and reports what came."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from paged.core.plan import SAMPLE, SCORE, StepPlan, StepResult
from paged.core.request import Request
from paged.kernels import vocab_parallel
from paged.kernels.batch_layout import BatchLayout
from paged.kernels.numerics import compute_dtype
from paged.kernels.sampling import SampledRows, sample, token_logprobs, top_logprobs
from paged.kernels.sampling_columns import LogitBias, Penalties
from paged.model.checkpoint import update_decoder
from paged.model.decoder import Decoder
from paged.runner.kv_cache import KVCache
from paged.runner.payload import PromptScore, StepPayload, Stop, TopLogprobs
from paged.runner.slots import LIMITS, Asks, SlotState, SlotTables, known_tokens
from paged.runner.step_graphs import StepGraphs, can_graph
from paged.runner.text import Tokenizer
from paged.runner.transfers import DeviceClock, StepTimer, download, download_all, upload

# Rows of full-vocabulary logits that scoring a prompt holds at a time.
SCORE_ROWS = 64

LogitsObserver = Callable[[StepPlan, Sequence[int], torch.Tensor], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Score:
    """Log-probabilities of some prompt tokens of one plan row, on their way to the host.

    Attributes:
        row: of the plan.
        request: whose prompt it is.
        first: position of the first token.
        token_ids: the prompt's tokens.
        logprobs_N: of these.
        tops: ids and log-probabilities [N, K] of the likeliest tokens at each position, if they were asked for.
    """

    row: int
    request: Request
    first: int
    token_ids: Sequence[int]
    logprobs_N: torch.Tensor
    tops: tuple[torch.Tensor, ...] | None


@dataclass(slots=True, eq=False)
class _Step:
    """A step that was handed to the device; its tensors are read once that is done.

    Attributes:
        plan: what is computed.
        timer: when.
        rows: of the plan, those that sample.
        states: of their sequences.
        nan_B: plan rows whose last hidden state is not finite.
        sampled: tokens, log-probabilities, log-probabilities after truncation and NaN flags of ``rows``.
        tops: places in ``rows``, how many alternatives each wants, and ids and log-probabilities of the likeliest.
        scores: of prompts.
    """

    plan: StepPlan
    timer: StepTimer
    rows: Sequence[int]
    states: Sequence[SlotState]
    nan_B: torch.Tensor
    sampled: tuple[torch.Tensor, ...] = ()
    tops: tuple[Sequence[int], Sequence[int], torch.Tensor, torch.Tensor] | None = None
    scores: list[_Score] = field(default_factory=list)


class TorchRunner:
    """An ``Executor`` that computes on one device; ``submit`` hands a step to it, ``collect`` waits for the oldest.

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
        graphs: CUDA graphs of whole steps, once ``warm_up`` has made them; None where steps are launched one by one.
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
        self.device = cache.device
        self.slots = SlotTables(
            max_num_seqs=max_num_seqs,
            max_seq_len=max_seq_len,
            block_size=cache.block_size,
            vocab_size=decoder.spec.vocab_size,
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
            device=self.device,
        )
        self.graphs: StepGraphs | None = None
        self.observe_logits: LogitsObserver | None = None
        self.weight_version = 0
        self._steps: deque[_Step] = deque()
        self._clock = DeviceClock(self.device)

    @torch.inference_mode()
    def warm_up(self, max_step_tokens: int) -> None:
        """Run one token through everything, so that the first step does not pay for the libraries' first calls.

        On cards steps of decodes become graphs, as larger ones will, of up to ``max_step_tokens`` rows. Writes into
        block 0, which nobody can hold yet.
        """
        layout = BatchLayout.build([0], [1], [[0]], self.cache.block_size, self.device)
        token_T = torch.zeros(1, dtype=torch.int64, device=self.device)
        logits_RV = self.decoder.logits(self.decoder(token_T, layout, self.cache))
        padding = torch.full((1,), self.slots.padding_slot, device=self.device)
        sample(logits_RV, self.slots.columns(padding, torch.zeros_like(padding), Asks(0)))
        if can_graph(self.decoder, self.cache):
            self.graphs = StepGraphs(self.decoder, self.cache, self.slots, max_step_tokens)
            self.graphs.capture_decodes()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Hand ``plan`` to the device; its result waits for ``collect``."""
        assert plan.weight_version == self.weight_version, (plan.weight_version, self.weight_version)
        timer = self._clock.start(is_idle=not self._steps)
        self.slots.apply(plan)
        rows = [row for row, logits in enumerate(plan.logits) if logits & SAMPLE]
        slots = [plan.slots[row] for row in rows]
        states, asks = [self.slots.state(slot) for slot in slots], self.slots.asks(slots)
        scores = any(logits & SCORE for logits in plan.logits)
        graphs = None if scores else self.graphs
        if graphs is not None and graphs.compute(plan, rows):
            if self.observe_logits is None and not asks & ~LIMITS:
                step = _Step(plan, timer, rows, states, *graphs.sample(asks))
            else:
                step = _Step(plan, timer, rows, states, download(graphs.nan_B))
                self._sample_plainly(step, graphs.last_BD, asks)
        else:
            step = self._compute_plainly(plan, timer, rows, states, asks)
        timer.stop()
        self._steps.append(step)

    def collect(self) -> StepResult:
        """The result of the oldest step; waits for it."""
        return self._result(self._steps.popleft())

    def load_weights(self, weights: Mapping[str, torch.Tensor] | Path | str) -> None:
        """Replace the weights, all or none; see ``paged.model.checkpoint.update_decoder``. No plan may be in flight."""
        assert not self._steps, "collect what was submitted before the weights change"
        update_decoder(self.decoder, weights)
        self.weight_version += 1

    def abandon(self) -> None:
        """Forget results that were not collected, and all slots: later plans start sequences anew."""
        self._steps.clear()
        self.slots.clear()

    def _compute_plainly(
        self, plan: StepPlan, timer: StepTimer, rows: Sequence[int], states: Sequence[SlotState], asks: int
    ) -> _Step:
        """One launch after the other."""
        starts, lengths = np.asarray(plan.starts), np.asarray(plan.lengths)
        layout = BatchLayout.build(
            starts,
            lengths,
            self.slots.blocks_SN,
            self.cache.block_size,
            self.device,
            table_rows=plan.slots,
            upload=self._upload,
        )
        slot_T = self._upload(np.repeat(np.asarray(plan.slots, dtype=np.int64), lengths))
        hidden_TD = self.decoder(self.slots.tokens_SP[slot_T, layout.positions_T], layout, self.cache)
        # Every row counts, not only those that sample: a chunk of a prompt that is not finite must not be committed,
        # or its blocks are published. What goes wrong at one position reaches the last one of the chunk.
        last_BD = hidden_TD.index_select(0, layout.last_rows_B)
        step = _Step(plan, timer, rows, states, download(~last_BD.isfinite().all(-1)))
        ends = np.cumsum(lengths)
        for row, logits in enumerate(plan.logits):
            if logits & SCORE:
                step.scores += self._score(plan, row, hidden_TD[ends[row] - lengths[row] : ends[row]])
        self._sample_plainly(step, last_BD, asks)
        return step

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return upload(array, self.device)

    def _sample_plainly(self, step: _Step, last_BD: torch.Tensor, asks: int) -> None:
        """Sample the rows of a step from each plan row's last hidden state, and keep the tokens."""
        plan, rows = step.plan, step.rows
        cut = self._cut_rows(step)
        whole = sorted(set(range(len(rows))).difference(cut))
        whole_rows = [rows[index] for index in whole]
        logits_RV = self._logits(last_BD.index_select(0, self._index(whole_rows)))
        if self.observe_logits is not None:
            self.observe_logits(plan, rows, logits_RV)
        drawn = self._sample(plan, whole_rows, logits_RV)
        if asks & Asks.LISTED:
            step.tops = self._alternatives([step.states[index] for index in whole], whole, logits_RV)
        if cut:
            last_CD = last_BD.index_select(0, self._index([rows[index] for index in cut]))
            drawn = self._with_cut_rows(drawn, whole, last_CD, cut)
        slot_R = self._index([plan.slots[row] for row in rows])
        position_R = self._index([plan.starts[row] + plan.lengths[row] for row in rows])
        self.slots.store_tokens(slot_R, position_R, drawn.tokens_R)
        for index, state in enumerate(step.states):
            if state.counts is not None:
                token_1 = drawn.tokens_R[index : index + 1]
                state.counts.output_V.index_add_(0, token_1, torch.ones_like(token_1, dtype=torch.int32))
        step.sampled = download_all((drawn.tokens_R, drawn.logprobs_R, drawn.behavior_logprobs_R, drawn.nan_R))

    def _index(self, numbers: Sequence[int] | np.ndarray) -> torch.Tensor:
        return self._upload(np.asarray(numbers, dtype=np.int64))

    def _cut_rows(self, step: _Step) -> list[int]:
        """Places among the rows of those that no rank needs to see whole: greedy, nothing to process or to list."""
        if self.decoder.group.size == 1 or self.observe_logits is not None:
            return []
        return [index for index, state in enumerate(step.states) if state.is_plain]

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
        order = self._index(np.argsort([*places, *cut]))

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

    def _sample(self, plan: StepPlan, rows: Sequence[int], logits_RV: torch.Tensor) -> SampledRows:
        """Draw the next token of the plan rows ``rows``, whose raw logits are given in the same order."""
        slots = [plan.slots[row] for row in rows]
        states = [self.slots.state(slot) for slot in slots]
        asks = self.slots.asks(slots)
        position_R = self._index([plan.starts[row] + plan.lengths[row] for row in rows])
        columns = self.slots.columns(self._index(slots), position_R, asks)
        if asks & Asks.ADJUSTED:
            columns = replace(columns, penalties=self._penalties(states), bias=self._bias(states))
        return sample(logits_RV, columns)

    def _penalties(self, states: Sequence[SlotState]) -> Penalties | None:
        rows = [row for row, state in enumerate(states) if state.counts is not None]
        if not rows:
            return None
        params = [states[row].request.params for row in rows]
        counts = [counts for row in rows if (counts := states[row].counts) is not None]

        def column(values: Sequence[float]) -> torch.Tensor:
            return self._upload(np.asarray(values, dtype=np.float64))

        return Penalties(
            rows_P=self._index(rows),
            repetition_P=column([p.repetition_penalty for p in params]),
            presence_P=column([p.presence_penalty for p in params]),
            frequency_P=column([p.frequency_penalty for p in params]),
            output_counts_PV=torch.stack([c.output_V for c in counts]),
            prompt_mask_PV=torch.stack([c.prompt_V for c in counts]),
        )

    def _bias(self, states: Sequence[SlotState]) -> LogitBias | None:
        triplets = [(row, *item) for row, s in enumerate(states) for item in s.request.params.biases]
        if not triplets:
            return None
        rows, ids, values = zip(*triplets, strict=True)
        return LogitBias(
            rows_N=self._index(rows),
            token_ids_N=self._index(ids),
            values_N=self._upload(np.asarray(values, dtype=np.float64)),
        )

    def _score(self, plan: StepPlan, row: int, hidden_CD: torch.Tensor) -> list[_Score]:
        """Score the prompt tokens that follow the positions of a chunk, whose final hidden states are given."""
        request = self.slots.state(plan.slots[row]).request
        first = plan.starts[row] + 1
        targets = known_tokens(request)[first : first + plan.lengths[row]]
        temperature, num_top = request.params.temperature, request.params.prompt_logprobs
        scores: list[_Score] = []
        for begin in range(0, len(targets), SCORE_ROWS):
            ids = targets[begin : begin + SCORE_ROWS]
            hidden_RD = hidden_CD[begin : begin + len(ids)]
            temperature_R = torch.full((len(ids),), temperature, dtype=torch.float64, device=self.device)
            tops: tuple[torch.Tensor, ...] | None = None
            if not num_top and self.decoder.group.size > 1:
                vocab_size, group = self.decoder.spec.vocab_size, self.decoder.group
                logits_RL = self.decoder.local_logits(hidden_RD)
                logprobs_R = vocab_parallel.token_logprobs(
                    logits_RL, temperature_R, self._index(ids), vocab_size=vocab_size, group=group
                )
            else:
                logits_RV = self.decoder.logits(hidden_RD)
                logprobs_R = token_logprobs(logits_RV, temperature_R, self._index(ids))
            if num_top:
                tops = download_all(top_logprobs(logits_RV, temperature_R, num_top))
            scores.append(_Score(row, request, first + begin, ids, download(logprobs_R), tops))
        return scores

    def _alternatives(
        self, states: Sequence[SlotState], places: Sequence[int], logits_RV: torch.Tensor
    ) -> tuple[Sequence[int], Sequence[int], torch.Tensor, torch.Tensor]:
        """The most likely tokens of those rows that ask for them; ``places`` are the rows' among all that sample."""
        wanted = [index for index, state in enumerate(states) if state.request.params.logprobs is not None]
        params = [states[index].request.params for index in wanted]
        counts = [p.logprobs or 0 for p in params]
        temperature_R = self._upload(np.asarray([p.temperature for p in params], dtype=np.float64))
        chosen_RV = logits_RV.index_select(0, self._index(wanted))
        ids_RK, values_RK = top_logprobs(chosen_RV, temperature_R, max(counts))
        return [places[index] for index in wanted], counts, download(ids_RK), download(values_RK)

    def _result(self, step: _Step) -> StepResult:
        """Wait for a step, and see who stops."""
        plan = step.plan
        start_s, end_s = self._clock.wait(step.timer)
        tokens_R, logprobs_R, behavior_R, nan_R = step.sampled
        tokens: list[int] = tokens_R.tolist()
        stops: dict[int, Stop] = {}
        for index, (row, state, token) in enumerate(zip(step.rows, step.states, tokens, strict=True)):
            if state.request.output_len is not None:
                if _ends_here(state.request, plan.starts[row] + plan.lengths[row] + 1):
                    stops[index] = Stop(None, is_token=False)
            elif token in state.stop_ids:
                asked = token in state.request.params.stop_token_ids
                stops[index] = Stop(token if asked else None, is_token=True)
            elif state.stream is not None and state.stream.push(token):
                stops[index] = Stop(state.stream.stopped_by, is_token=False)
        nan_rows = set(step.nan_B[: len(plan.slots)].nonzero().flatten().tolist())
        nan_rows.update(step.rows[index] for index in nan_R.nonzero().flatten().tolist())
        nan_rows.update(score.row for score in step.scores if bool(score.logprobs_N.isnan().any()))
        payload = StepPayload(
            tokens=tokens,
            logprobs=logprobs_R.tolist(),
            behavior_logprobs=behavior_R.tolist(),
            top_logprobs=_listed(step),
            stops=stops,
            scores=[(score.request, score.first, _prompt_scores(score)) for score in step.scores],
        )
        stopped = [False] * len(tokens)
        for index in stops:
            stopped[index] = True
        return StepResult(plan.step, tokens, stopped, sorted(nan_rows), start_s, end_s, payload)


def _listed(step: _Step) -> dict[int, TopLogprobs]:
    """The alternatives of the rows that asked for them, by their place among the rows that sample."""
    if step.tops is None:
        return {}
    places, counts, ids_RK, values_RK = step.tops
    found = zip(places, counts, ids_RK.tolist(), values_RK.tolist(), strict=True)
    return {place: (ids[:count], values[:count]) for place, count, ids, values in found}


def _prompt_scores(score: _Score) -> list[PromptScore]:
    tops: Sequence[TopLogprobs] = [([], [])] * len(score.token_ids)
    if score.tops is not None:
        tops = list(zip(*(top.tolist() for top in score.tops), strict=True))
    return [PromptScore(*one) for one in zip(score.token_ids, score.logprobs_N.tolist(), tops, strict=True)]


def _ends_here(request: Request, num_tokens: int) -> bool:
    """Whether a request of a given output length ends now that it has ``num_tokens`` tokens, prompt included."""
    assert request.output_len is not None
    return num_tokens - len(request.prompt) == request.output_len < request.max_tokens
