"""The engine: requests wait in a queue, run in slots, and leave as completions. The host stays one dispatch behind."""

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.adjust import Adjust
from dspark_jax.decoding.admission import STOP_WIDTH, admit, next_chunks
from dspark_jax.decoding.caches import PageAllocator, empty_pools, prefix_keys
from dspark_jax.decoding.load import Load
from dspark_jax.decoding.profiling import measure_costs
from dspark_jax.decoding.requests import Completion, Prompt, Request, StreamEvent, new_requests
from dspark_jax.decoding.results import features_of, rounds_of
from dspark_jax.decoding.round import decode, empty_carry, prefill
from dspark_jax.decoding.sampling import MAX_LOGPROBS, SAMPLERS, SamplingParams, SlotSampling
from dspark_jax.decoding.schedule import SlotSchedule, policy_of
from dspark_jax.decoding.sink import Sink, hand_over
from dspark_jax.decoding.state import Caches, Emitted, Models, Slots, Weights, permute, set_slot
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import Drafter, check_fit, load_drafter
from dspark_jax.interop.target_io import Target
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.few_rows import for_few_rows
from dspark_jax.parallel import everywhere, on
from dspark_jax.scheduling.calibration import Temperatures
from dspark_jax.scheduling.cost_model import CostTable
from dspark_jax.scheduling.scheduler import drafts_of
from pallas_kernels.backends import KERNELS, choose

PREFILL_CHUNK = 128  # prompt tokens per slot and prefill program; chunks start at its multiples


def bucket(count: int) -> int:
    """The next power of two: sizes of compiled programs."""
    return 1 << max(count - 1, 0).bit_length()


@dataclasses.dataclass
class _Dispatch:
    """A launched decode program and the requests that were in its slots."""

    requests: list[Request]
    emitted: Emitted
    size: tuple[int, int]  # slots and tokens of context that it was compiled for
    drafts: int
    timed: bool  # the device had nothing else to do since the dispatch before it


class Engine:
    """Generates for many prompts at once, speculatively when it has a drafter. The output is the target's own.

    `drafter`: a loaded one, or what `load_drafter` takes: a directory or hub id, "lookup" (copies from the request's
    own text; no weights) or "auto" (the released drafter of a known target, else lookup; prints which). Where it has no
    confidences, the running acceptance of each position, request by request, stands in.

    `max_slots` requests run together; `cache_tokens` rows of keys and values are shared by all of them (default: 1024
    a slot). `max_length` bounds prompt and answer (default: the model's context). `cost_table`: what rounds cost here,
    for the strategies that weigh it ("auto" then is "load_aware"; the others measure one at start where it is missing);
    `temperatures`: the drafter's calibration. `sink`: gets the features of all accepted rows. `kernels`: "auto" (of the
    device, where there are some), "tpu", "gpu" or "xla". On a CPU a larger model's layers are copied, once for all
    engines of a target, as rounds of few rows read them fastest (`models/few_rows.py`).
    Raises UserError on parts that do not fit together.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | str | Path | None = None,
        *,
        strategy: str = "auto",
        sampler: str = "rejection",
        max_slots: int = 16,
        max_length: int | None = None,
        cache_tokens: int | None = None,
        page_size: int = 16,
        rounds_per_dispatch: int = 4,
        cost_table: CostTable | None = None,
        temperatures: Temperatures | None = None,
        sink: Sink | None = None,
        kernels: str = "auto",
    ):
        if sampler not in SAMPLERS:
            raise UserError(f"unknown sampler {sampler!r}: known are {', '.join(SAMPLERS)}")
        if max_slots < 1 or page_size < 1 or rounds_per_dispatch < 1:
            raise UserError("max_slots, page_size and rounds_per_dispatch must be at least 1")
        if isinstance(drafter, str | Path):
            drafter = load_drafter(drafter, target)
        if drafter:
            check_fit(drafter.config, target)
        if kernels not in KERNELS:
            raise UserError(f"unknown kernels {kernels!r}: known are {', '.join(KERNELS)}")
        chosen, _ = choose(kernels, jax.tree.leaves(target.params), ("tpu", "gpu"))
        self.policy = policy_of(sampler, strategy, drafter, cost_table, chosen)
        kind = self.policy.strategy
        drafter = None if kind.name == "off" else drafter
        self.drafts = drafts_of(kind, drafter.config.num_drafts) if drafter else 0
        self.temperatures = temperatures
        draft_taps, sink_layers = drafter.config.tap_layers if drafter else (), sink.tap_layers if sink else ()
        # The drafter's taps come first, in its own order.
        self.target = target.with_taps((*draft_taps, *(i for i in sink_layers if i not in draft_taps)))
        self.sink = sink
        self.max_slots, self.page_size, self.rounds = max_slots, page_size, rounds_per_dispatch
        self.max_length = min(max_length or target.config.max_length, target.config.max_length)
        rows = cache_tokens or max(max_slots * 1024, min(self.max_length, 4096))
        self.pages = PageAllocator(-(-rows // page_size))
        tokens = target.config.vocab_size
        if target.tokenizer:
            tokens = min(tokens, target.tokenizer.vocab_size)
        sink_taps = tuple(map(self.target.tap_layers.index, sink_layers)) if sink else None
        attention = "gpu" if chosen == "gpu" else "xla" if kernels == "xla" else "auto"
        self.models = Models(self.target.module, drafter.module if drafter else None, tokens, sink_taps, attention)
        self.weights = Weights(target.params, *((drafter.params, drafter.borrowed) if drafter else ()))
        if chosen == "xla" and target.by_row is not None:
            drafts = for_few_rows(self.weights.drafter)
            self.weights = self.weights.replace(drafter=drafts, target_by_row=target.by_row)
        pool_sizes = (self.pages.total, page_size, target.dtype, target.mesh)
        draft_pools = empty_pools(drafter.config.decoder, *pool_sizes) if self.models.drafts_by_network else None
        self.caches = Caches(empty_pools(target.config, *pool_sizes), draft_pools)
        self._asked = {"sampled": False, "limited": False}  # by any request so far: programs can do no more
        self.slots = self.empty_slots()
        self._busy, self._start = False, 0.0
        self.load = None
        if self.policy.needs_cost:
            table = cost_table or measure_costs(self, drafter)
            self.load = Load(table, self.drafts, parks=kind.name.startswith("load_aware"))
            self._drafter = drafter

    @property
    def context(self) -> int:
        """Most tokens, prompt and answer, that one request can have."""
        return min(self.max_length, self.pages.total * self.page_size)

    # ------------------------------------------------------------------------------------------------ public face

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> list[Completion]:
        """Completions in the order of the prompts. `params`: one for all, or one each.

        A request that cannot run ends with the reason "error" and says why; the others are not touched by it.
        """
        requests = self.requests(prompts, params)
        for _ in self.run(requests, self.rounds):
            pass
        return [request.completion for request in requests]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        rounds_per_dispatch: int = 1,
    ) -> Iterator[StreamEvent]:
        """Yields (request, text_delta, token_ids, finish_reason) as tokens are committed."""
        yield from (event for _, event in self.run(self.requests(prompts, params), rounds_per_dispatch))

    def stream_completions(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> Iterator[tuple[int, Completion]]:
        """Yields (request, completion) as requests end, in whatever order they do."""
        for request, event in self.run(self.requests(prompts, params), self.rounds):
            if event.finish_reason:
                yield request.index, request.completion

    def requests(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[Request]:
        """Queued requests for `run`, in the order of the prompts. Setting `cancelled` ends one at the next dispatch."""
        return new_requests(prompts, params)

    # ---------------------------------------------------------------------------------------------------- the loop

    def run(self, requests: list[Request], rounds: int) -> Iterator[tuple[Request, StreamEvent]]:
        """Runs all requests; yields (request, event) for every dispatch in which the request has something to show.

        A pass of the loop admits requests, caches one chunk of the prompts admitted, and launches one dispatch, so that
        a long prompt holds decoding up for no longer than a chunk.
        """
        if self._busy:
            raise UserError(
                "this engine is already generating: finish or close that stream first, or make a second engine"
            )
        if self.load and self.load.stale:
            self.load = Load(measure_costs(self, self._drafter), self.drafts, self.load.parks)
        self._busy = True
        self._empty_slots_for(requests)  # an abandoned stream may have left slots running
        self._start, self._collected, self._launched = time.monotonic(), 0.0, None
        queue, filling = collections.deque(requests), []
        live: list[Request] = []  # in slot order
        pending: collections.deque[_Dispatch] = collections.deque()
        try:
            while queue or filling or live or pending:
                yield from self._end_cancelled([*filling, *live])
                filling = [request for request in filling if not request.ended]
                live = self._compact(live)
                yield from self._admit(queue, live, filling)
                live, filling = self._fill(live, filling)
                if live:
                    with on(self.target.mesh):
                        pending.append(self._launch(live, rounds))
                # The dispatch just launched runs while the host reads the one before it.
                if pending and (len(pending) > 1 or not live):
                    yield from self._collect(pending.popleft())
        finally:
            self._busy = False
            for request in requests:
                self._free(request)

    def fill(self, requests: list[Request]) -> None:
        """Admits requests and caches their prompts, with no decoding: for benchmarks, which time rounds alone."""
        self._empty_slots_for(requests)
        live, filling = [], []
        for _ in self._admit(collections.deque(requests), live, filling):
            raise UserError("a benchmark's prompt does not fit")
        while filling:
            live, filling = self._fill(live, filling)

    def _now(self) -> float:
        return time.monotonic() - self._start

    def _end_cancelled(self, requests: list[Request]) -> Iterator[tuple[Request, StreamEvent]]:
        for request in requests:
            if request.cancelled and not request.ended:
                event = request.end("cancelled", self._now())
                self._hand_over(request)
                self._free(request)
                yield request, event

    def _collect(self, dispatch: _Dispatch) -> Iterator[tuple[Request, StreamEvent]]:
        """Reads a dispatch's tokens (waits for the device) and frees the pages of the requests that ended."""
        out: Emitted = jax.device_get(dispatch.emitted)
        now, before = self._now(), self._collected
        self._collected = now
        if self.load:
            self.load.observe(dispatch.size, bool(dispatch.drafts), out, now - before if dispatch.timed else None)
        for slot, request in enumerate(dispatch.requests):
            if request.ended:  # by a stop string or from outside, while this dispatch was running
                continue
            rounds = rounds_of(out, slot, dispatch.drafts, request.params.logprobs)
            request.features += features_of(out, slot)
            event = request.take(rounds, self._now())
            self._hand_over(request)
            if request.ended:
                self._free(request)
            if event:
                yield request, event

    def _hand_over(self, request: Request) -> None:
        if self.sink:
            hand_over(self.sink, request, request.settled_rows)

    def _free(self, request: Request) -> None:
        self.pages.give(request.pages)
        request.release()

    def _launch(self, live: list[Request], rounds: int) -> _Dispatch:
        """Starts up to `rounds` rounds of all live slots; returns without waiting."""
        active = min(bucket(len(live)), self.max_slots)
        # Two dispatches may be in flight: the host's lengths lag by one.
        ahead = 2 * rounds * (self.drafts + 1)
        longest = max(len(r.prompt_ids) + min(len(r.completion.token_ids) + ahead, r.max_tokens) for r in live)
        asked = max(-1 if r.params.logprobs is None else r.params.logprobs for r in live)
        pages = self.context_pages(longest)
        size = (active, pages * self.page_size)
        drafts = self.drafts if self.load is None or self.load.drafts(size) else 0
        self.caches, self.slots, emitted = decode(
            self.models,
            self.policy,
            self.weights,
            self.caches,
            self.slots,
            self.load.cost(size) if self.load and drafts else None,
            active=active,
            drafts=drafts,
            context_pages=pages,
            rounds=rounds,
            top_logprobs=asked if asked < 1 else self._top,
        )
        timed = self._launched == (size, drafts)  # the first of its kind may have had to be compiled
        self._launched = (size, drafts)
        return _Dispatch(list(live), emitted, size, drafts, timed)

    @property
    def _top(self) -> int:
        """How many likeliest tokens a program computes where any request wants some: one program for all numbers."""
        return min(MAX_LOGPROBS, self.target.config.vocab_size)

    def context_pages(self, tokens: int) -> int:
        """Pages a program reads per slot: a power of two, at least 64 rows' worth, at most the table's width."""
        return min(bucket(-(-max(tokens, 64) // self.page_size)), self.slots.table_RxC.shape[1])

    # ---------------------------------------------------------------------------------------------------- the slots

    def empty_slots(self) -> Slots:
        """All slots ended, with no pages."""
        width = -(-self.max_length // self.page_size)
        zeros = np.zeros(self.max_slots, np.int32)
        one = self.slot_sampling(SamplingParams(), 0, ())
        sampling = jax.tree.map(lambda a: np.repeat(np.asarray(a)[None], self.max_slots, axis=0), one)
        table = np.zeros((self.max_slots, min(width, self.pages.total)), np.int32)
        carry = empty_carry(self.models.drafter, self.max_slots, self.target.dtype)
        schedule = jax.tree.map(lambda a: np.repeat(np.asarray(a)[None], self.max_slots, axis=0), self._schedule(1.0))
        history = np.zeros((self.max_slots, self.context), np.int32) if self.models.reads_history else ()
        slots = Slots(zeros, zeros, zeros, table, carry, sampling, (), schedule, history)
        return everywhere(jax.tree.map(jnp.asarray, slots), self.target.mesh)

    def _empty_slots_for(self, requests: list[Request]) -> None:
        """Empties the slots, whose programs can from here on do what these requests ask for, too."""
        params = [request.params for request in requests]
        self._asked = {name: known or any(getattr(p, name) for p in params) for name, known in self._asked.items()}
        self.slots = self.empty_slots()

    def slot_sampling(self, params: SamplingParams, seed: int, stop_ids: tuple[int, ...]) -> SlotSampling:
        """One slot's entries, with a promise of what no request of this engine has asked for so far."""
        return SlotSampling.of(params, seed, stop_ids, STOP_WIDTH, **self._asked)

    def _schedule(self, temperature: float) -> SlotSchedule | tuple[()]:
        """A slot's entries for the scheduler: its drafter's calibration at the request's temperature."""
        if not self.policy.scheduled:
            return ()
        known = self.temperatures
        fitted = known.of(self.policy.sampler, temperature, self.drafts) if known else np.ones(self.drafts)
        kinds = self.models.drafter.longest + 1 if self.models.reads_history else 1
        return SlotSchedule.of(fitted, kinds if self.policy.running else 0)

    def _compact(self, live: list[Request]) -> list[Request]:
        """Moves the requests that go on to the front; the other slots end."""
        keep = [i for i, request in enumerate(live) if not request.ended]
        if len(keep) < len(live):
            rest = [i for i in range(self.max_slots) if i not in set(keep)]
            self.slots = permute(self.slots, np.asarray(keep + rest), len(keep))
        return [live[i] for i in keep]

    def _admit(
        self, queue: collections.deque[Request], live: list[Request], filling: list[Request]
    ) -> Iterator[tuple[Request, StreamEvent]]:
        """Gives waiting requests slots and pages as far as they last; `filling` grows by them.

        Yields refusals, and cancelled requests whose turn it is: looking at the whole queue each time would cost more
        than a round.
        """
        while queue and len(live) + len(filling) < self.max_slots:
            request = queue[0]
            yield from self._end_cancelled([request])
            if not request.ended and not request.prompt_ids:
                try:
                    admit(request, self.target, self.context, own_noise=self.policy.shares_budgets)
                except UserError as error:
                    yield request, request.end("error", self._now(), str(error))
            if request.ended:
                queue.popleft()
            elif self._take_pages(request, filling):
                filling.append(queue.popleft())
            else:
                break

    def _take_pages(self, request: Request, filling: list[Request]) -> bool:
        """Pages for a request, those of a known prefix among them. False: it has to wait."""
        keys = self._keys(request)
        shared = self.pages.match(keys)
        # Somebody is computing the next page of this prefix just now.
        if len(shared) < len(keys) and any(keys[len(shared)] in self._keys(other) for other in filling):
            return False
        # A round may run past the end of the request by a block; those rows are dropped, not written.
        pages = self.pages.take(-(-(len(request.prompt_ids) + request.max_tokens) // self.page_size), shared)
        request.pages, request.cached = pages or [], len(shared) * self.page_size
        request.carry = jax.tree.map(lambda a: a[0], empty_carry(self.models.drafter, 1, self.target.dtype))
        return pages is not None

    def _keys(self, request: Request) -> list[bytes]:
        """Of the full pages of a prompt, without its last token: the first round runs that.

        None with a sink, which wants every row of every request.
        """
        if self.sink:
            return []
        return prefix_keys(request.prompt_ids[:-1], self.page_size, int(isinstance(self.models.drafter, Eagle3)))

    def _fill(self, live: list[Request], filling: list[Request]) -> tuple[list[Request], list[Request]]:
        """Caches the next chunk of every prompt; those that are done become live."""
        if any(request.cached < len(request.prompt_ids) - 1 for request in filling):
            with on(self.target.mesh):
                self._prefill(filling)
            self._launched = None
        ready = [request for request in filling if request.cached == len(request.prompt_ids) - 1]
        for request in ready:
            keys = self._keys(request)
            self.pages.publish(keys, request.pages[: len(keys)])
            self._set_adjust([*live, request])
            self.slots = set_slot(self.slots, len(live), self._slot_entries(request))
            live = [*live, request]
        return live, [request for request in filling if request not in ready]

    def _set_adjust(self, live: list[Request]) -> None:
        """Slots carry adjustments, which cost a vocabulary each, only while somebody asks for them."""
        wanted = any(request.params.adjusts for request in live)
        if wanted and not self.slots.adjust:
            neutral = Adjust.neutral(self.max_slots, self.target.config.vocab_size)
            self.slots = self.slots.replace(adjust=neutral)
        elif not wanted and self.slots.adjust:
            self.slots = self.slots.replace(adjust=())

    def _slot_entries(self, request: Request) -> Slots:
        params, ids = request.params, request.prompt_ids
        sampling = self.slot_sampling(params, request.seed, request.stop_ids)
        numbers = (np.int32(ids[-1]), np.int32(len(ids)), np.int32(request.max_tokens))
        adjust = Adjust.of(params, ids, self.target.config.vocab_size) if self.slots.adjust else ()
        schedule, history = self._schedule(params.temperature), ()
        if self.models.reads_history:
            history = np.zeros(self.context, np.int32)
            history[: len(ids)] = ids
        return Slots(*numbers, self._table_row(request), request.carry, sampling, adjust, schedule, history)

    def _table_row(self, request: Request) -> np.ndarray:
        row = np.zeros(self.slots.table_RxC.shape[1], np.int32)
        row[: len(request.pages)] = request.pages
        return row

    def _prefill(self, requests: list[Request]) -> None:
        """One chunk of each request's prompt tokens but the last, which is the first round's anchor."""
        slots = min(bucket(len(requests)), self.max_slots)
        start, count, tokens = next_chunks(requests, slots, PREFILL_CHUNK, bucket)
        table = np.zeros((slots, self.slots.table_RxC.shape[1]), np.int32)
        table[: len(requests)] = [self._table_row(request) for request in requests]
        empty = jax.tree.map(np.asarray, empty_carry(self.models.drafter, slots - len(requests), self.target.dtype))
        carry = jax.tree.map(lambda *rows: jnp.stack(rows), *[r.carry for r in requests])
        carry = jax.tree.map(lambda rows, rest: jnp.concatenate([rows, rest]), carry, empty)
        self.caches, carry, features = prefill(
            self.models,
            self.weights,
            self.caches,
            table,
            tokens[:, :-1],
            tokens[:, 1:],
            start,
            count,
            carry,
            context_pages=self.context_pages(int(start.max())),
        )
        for i, request in enumerate(requests):
            request.cached += int(count[i])
            request.carry = jax.tree.map(lambda a, i=i: a[i], carry)
            if self.sink:
                request.features.append(jax.tree.map(lambda a, i=i: a[i, : count[i]], features))
