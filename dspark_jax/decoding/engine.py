"""The engine: requests wait in a queue, run in slots, and leave as completions. The host stays one dispatch behind."""

import collections
import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.caches import PageAllocator, empty_pools
from dspark_jax.decoding.requests import Completion, Prompt, Request, StreamEvent, prompt_token_ids
from dspark_jax.decoding.round import Caches, Emitted, Models, Slots, Weights, decode, empty_carry, prefill
from dspark_jax.decoding.sampling import SAMPLERS, SamplingParams, SlotSampling
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import Drafter, check_fit
from dspark_jax.interop.target_io import Target
from dspark_jax.interop.tokenizer import StreamDecoder
from dspark_jax.scheduling.scheduler import drafts_per_round

PREFILL_CHUNK = 128  # prompt tokens per slot and prefill program; chunks start at its multiples
STOP_WIDTH = 8  # stop tokens a request may have


def bucket(count: int) -> int:
    """The next power of two: sizes of compiled programs."""
    return 1 << max(count - 1, 0).bit_length()


@dataclasses.dataclass
class _Dispatch:
    """A launched decode program and the requests that were in its slots."""

    requests: list[Request]
    emitted: Emitted


class Engine:
    """Generates for many prompts at once, speculatively when it has a drafter. The output is the target's own.

    `max_slots` requests run together; `cache_tokens` rows of keys and values are shared by all of them (default: 1024
    a slot). `max_length` bounds prompt and answer (default: the model's context). Raises UserError on parts that do
    not fit together.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        strategy: str = "auto",
        sampler: str = "rejection",
        max_slots: int = 16,
        max_length: int | None = None,
        cache_tokens: int | None = None,
        page_size: int = 16,
        rounds_per_dispatch: int = 4,
    ):
        if sampler not in SAMPLERS:
            raise UserError(f"unknown sampler {sampler!r}: known are {', '.join(SAMPLERS)}")
        if max_slots < 1 or page_size < 1 or rounds_per_dispatch < 1:
            raise UserError("max_slots, page_size and rounds_per_dispatch must be at least 1")
        if drafter:
            check_fit(drafter.config, target)
        self.drafts = drafts_per_round(strategy, drafter.config.num_drafts if drafter else 0)
        drafter = drafter if self.drafts else None
        self.target = target.with_taps(drafter.config.tap_layers if drafter else ())
        self.max_slots, self.page_size, self.rounds = max_slots, page_size, rounds_per_dispatch
        self.max_length = min(max_length or target.config.max_length, target.config.max_length)
        rows = cache_tokens or max(max_slots * 1024, min(self.max_length, 4096))
        self.pages = PageAllocator(-(-rows // page_size))
        self.models = Models(self.target.module, drafter.module if drafter else None, sampler)
        self.weights = Weights(target.params, *((drafter.params, drafter.borrowed) if drafter else ()))
        pool_sizes = (self.pages.total, page_size, target.dtype)
        draft_pools = empty_pools(drafter.config.decoder, *pool_sizes) if drafter else None
        self.caches = Caches(empty_pools(target.config, *pool_sizes), draft_pools)
        self.slots = self._empty_slots()
        self._busy = False

    @property
    def context(self) -> int:
        """Most tokens, prompt and answer, that one request can have."""
        return min(self.max_length, self.pages.total * self.page_size)

    # ------------------------------------------------------------------------------------------------ public face

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> list[Completion]:
        """Completions in the order of the prompts. `params`: one for all, or one each."""
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

    # --------------------------------------------------------------------------------------------------- requests

    def requests(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[Request]:
        """Requests ready to run, in the order of the prompts; each fills its own `completion`."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts, but {len(each)} sampling parameters: give one for all, or one each"
            )
        return [self._request(i, prompt, p) for i, (prompt, p) in enumerate(zip(prompts, each, strict=True))]

    def _request(self, index: int, prompt: Prompt, params: SamplingParams) -> Request:
        config, tokenizer = self.target.config, self.target.tokenizer
        ids = prompt_token_ids(prompt, tokenizer, config.vocab_size)
        room = self.context - len(ids)
        if room < 1:
            raise UserError(f"prompt {index} has {len(ids)} tokens, the context holds {self.context}: shorten it")
        stops = () if params.ignore_eos else config.eos_token_ids
        stops = tuple(dict.fromkeys((*stops, *params.stop_token_ids)))
        if len(stops) > STOP_WIDTH:
            raise UserError(f"prompt {index} has {len(stops)} stop tokens, at most {STOP_WIDTH} are supported")
        seed = random.getrandbits(64) if params.seed is None else params.seed
        decoder = StreamDecoder(tokenizer) if tokenizer else None
        completion = Completion([], "", None, [], [], [])
        return Request(index, ids, params, seed, min(params.max_tokens, room), stops, decoder, completion)

    # ---------------------------------------------------------------------------------------------------- the loop

    def run(self, requests: list[Request], rounds: int) -> Iterator[tuple[Request, StreamEvent]]:
        """Runs all requests; yields (request, event) for every dispatch in which the request got tokens."""
        if self._busy:
            raise UserError(
                "this engine is already generating: finish or close that stream first, or make a second engine"
            )
        self._busy, self.slots = True, self._empty_slots()  # an abandoned stream may have left slots running
        queue = collections.deque(requests)
        live: list[Request] = []  # in slot order
        pending: collections.deque[_Dispatch] = collections.deque()
        try:
            while queue or live or pending:
                live = self.refill(live, queue)
                if live:
                    pending.append(self._launch(live, rounds))
                # The dispatch just launched runs while the host reads the one before it.
                if len(pending) > 1 or not live:
                    yield from self._collect(pending.popleft())
        finally:
            self._busy = False
            for request in requests:
                self._free(request)

    def _collect(self, dispatch: _Dispatch) -> Iterator[tuple[Request, StreamEvent]]:
        """Reads a dispatch's tokens (waits for the device) and frees the pages of the requests that ended."""
        out: Emitted = jax.device_get(dispatch.emitted)
        for slot, request in enumerate(dispatch.requests):
            tokens: list[int] = []
            for d in np.flatnonzero(out.count_DxR[:, slot]):
                new = out.token_DxRxQ[d, slot, : out.count_DxR[d, slot]].tolist()
                request.push(new, self.drafts, int(out.verified_DxR[d, slot]), int(out.accepted_DxR[d, slot]))
                tokens += new
            if tokens:
                event = request.event(tokens)
                if event.finish_reason:
                    self._free(request)
                yield request, event

    def _free(self, request: Request) -> None:
        self.pages.give(request.pages)
        request.pages = []

    def _launch(self, live: list[Request], rounds: int) -> _Dispatch:
        """Starts up to `rounds` rounds of all live slots; returns without waiting."""
        active = min(bucket(len(live)), self.max_slots)
        # Two dispatches may be in flight: the host's lengths lag by one.
        ahead = 2 * rounds * (self.drafts + 1)
        longest = max(len(r.prompt_ids) + min(len(r.completion.token_ids) + ahead, r.max_tokens) for r in live)
        self.caches, self.slots, emitted = decode(
            self.models,
            self.weights,
            self.caches,
            self.slots,
            active=active,
            drafts=self.drafts,
            context_pages=self.context_pages(longest),
            rounds=rounds,
        )
        return _Dispatch(list(live), emitted)

    def context_pages(self, tokens: int) -> int:
        """Pages a program reads per slot: a power of two, at least 64 rows' worth, at most the table's width."""
        return min(bucket(-(-max(tokens, 64) // self.page_size)), self.slots.table_RxC.shape[1])

    # ---------------------------------------------------------------------------------------------------- the slots

    def _empty_slots(self) -> Slots:
        """All slots ended, no pages."""
        width = -(-self.max_length // self.page_size)
        zeros = np.zeros(self.max_slots, np.int32)
        one = SlotSampling.of(SamplingParams(), 0, (), STOP_WIDTH)
        sampling = jax.tree.map(lambda a: np.repeat(np.asarray(a)[None], self.max_slots, axis=0), one)
        table = np.zeros((self.max_slots, min(width, self.pages.total)), np.int32)
        carry = empty_carry(self.models.drafter, self.max_slots, self.target.dtype)
        return jax.tree.map(jnp.asarray, Slots(zeros, zeros, zeros, table, carry, sampling))

    def refill(self, live: list[Request], queue: collections.deque[Request]) -> list[Request]:
        """Moves live requests to the front and gives free slots, as far as pages last, to waiting ones."""
        keep = [i for i, request in enumerate(live) if request.completion.finish_reason is None]
        kept = [live[i] for i in keep]
        admitted = []
        while queue and len(kept) + len(admitted) < self.max_slots:
            request = queue[0]
            # A round may run past the end of the request by a block; those rows are dropped, not written.
            pages = self.pages.take(-(-(len(request.prompt_ids) + request.max_tokens) // self.page_size))
            if pages is None:
                break
            request.pages = pages
            admitted.append(queue.popleft())
        if len(keep) < len(live) or admitted:
            rest = [i for i in range(self.max_slots) if i not in set(keep)]
            self.slots = _permute(self.slots, np.asarray(keep + rest))
        carry = self._prefill(admitted) if admitted else ()
        for i, request in enumerate(admitted):
            own = jax.tree.map(lambda a, i=i: a[i], carry)
            self.slots = _set_slot(self.slots, len(kept) + i, self._slot_entries(request, own))
        return kept + admitted

    def _slot_entries(self, request: Request, carry: Any) -> Slots:
        sampling = SlotSampling.of(request.params, request.seed, request.stop_ids, STOP_WIDTH)
        ids = request.prompt_ids
        numbers = (np.int32(ids[-1]), np.int32(len(ids)), np.int32(request.max_tokens))
        return Slots(*numbers, self._table_row(request), carry, sampling)

    def _table_row(self, request: Request) -> np.ndarray:
        row = np.zeros(self.slots.table_RxC.shape[1], np.int32)
        row[: len(request.pages)] = request.pages
        return row

    def _prefill(self, requests: list[Request]) -> Any:
        """Caches all prompt tokens but the last, which is the first round's anchor. Returns their carries."""
        longest = max(len(r.prompt_ids) for r in requests) - 1
        slots = min(bucket(len(requests)), self.max_slots)
        table = np.zeros((slots, self.slots.table_RxC.shape[1]), np.int32)
        for i, request in enumerate(requests):
            table[i] = self._table_row(request)
        carry = empty_carry(self.models.drafter, slots, self.target.dtype)
        for start in range(0, longest, PREFILL_CHUNK):
            # One token more than the chunk: some drafters read a row's successor.
            parts = [r.prompt_ids[start : start + PREFILL_CHUNK + 1] for r in requests]
            count = np.array([max(len(part) - 1, 0) for part in parts] + [0] * (slots - len(parts)), np.int32)
            width = bucket(max(8, int(count.max())))
            tokens = np.zeros((slots, width + 1), np.int32)
            for i, part in enumerate(parts):
                tokens[i, : len(part)] = part
            self.caches, carry = prefill(
                self.models,
                self.weights,
                self.caches,
                table,
                tokens[:, :-1],
                tokens[:, 1:],
                np.full(slots, start, np.int32),
                count,
                carry,
                context_pages=self.context_pages(start),
            )
        return carry


@jax.jit
def _permute(slots: Slots, order: jax.Array) -> Slots:
    return jax.tree.map(lambda a: a[order], slots)


@jax.jit
def _set_slot(slots: Slots, index: jax.Array, entries: Slots) -> Slots:
    return jax.tree.map(lambda all_, one: all_.at[index].set(one), slots, entries)
