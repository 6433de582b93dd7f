# SPDX-License-Identifier: Apache-2.0
"""Desk: the open requests of all frontends, between their Submit and their last event. No I/O, one thread.

Requests come in from frontends, go to the engine core, and results come back as events. The text server calls it and
gives it two ways out: `frontend.post` for events, `send` for messages to the core. Whatever happens to a frontend or
to the core, every request ends exactly once and nothing of it stays in the core.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from quire_engine.admission import Admission
from quire_engine.completion import Completion
from quire_engine.generation import Generation
from quire_engine.metrics import Metrics
from quire_engine.quota import Quotas
from quire_engine.text import Tokenizer
from quire_spec.documents.adapter_catalog import AdapterLimits
from quire_spec.errors import Code, Internal, QuireError, Unavailable
from quire_spec.protocol.messages import (
    AbortSequences,
    AdapterEvent,
    GenerateRequest,
    IpcMessage,
    OutputDelta,
    SequenceDelta,
    StepResult,
)

_MAX_EARLY = 256
"""Moves of adapters that have no name yet, kept for when they get one."""


class Frontend(Protocol):
    """Where a request came from."""

    def post(self, event: OutputDelta) -> None:
        """Send an event; must not call the desk back."""


class Desk:
    """Open requests, by sequence id and by frontend."""

    def __init__(
        self,
        admission: Admission,
        tokenizer: Tokenizer | None,
        metrics: Metrics,
        send: Callable[[IpcMessage], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_queued = 0
        """Open requests that have not run yet."""
        self._admission = admission
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._send = send
        self._clock = clock
        # Not from zero: after a restart of the text process, its ids differ from those that the core still knows.
        self._next_id = int(time.time() * 1000) << 16
        self._open: dict[int, tuple[Generation, Frontend]] = {}
        """By sequence: those whose output is not over."""
        self._of: defaultdict[Frontend, dict[int, Generation]] = defaultdict(dict)
        self._on_empty: list[Callable[[], None]] = []
        self._names: dict[str, list[str]] = {}
        """Adapter names by digest."""
        self._slots: list[str] = []
        self._quotas = Quotas()
        self._early: deque[AdapterEvent] = deque(maxlen=_MAX_EARLY)

    @property
    def num_open(self) -> int:
        """Open requests, queued ones included."""
        return sum(map(len, self._of.values()))

    def is_open(self, generation: Generation) -> bool:
        """Whether a request is still wanted; may be asked from another thread."""
        return not generation.over

    def max_prompt_tokens(self, generation: Generation) -> int | None:
        """To how many tokens a request wants its prompt cut; may be asked from another thread."""
        return generation.params.max_prompt_tokens(self._admission.limits.max_model_len)

    def submit(self, frontend: Frontend, submit: GenerateRequest) -> Generation | None:
        """A request comes. Returns it if it has text to be tokenized: `tokenized` or `fail` goes on.

        Raises:
            Internal: the frontend has a request of this id open; its connection is not to be trusted.
        """
        if type(submit.id) is not int or submit.id in self._of[frontend]:
            raise Internal(f"GenerateRequest with id {submit.id!r}, which is open already or no integer")
        try:
            admitted = self._admission.admit(submit, self.num_queued)
        except QuireError as error:
            self._refuse(frontend, submit.id, error)
            return None
        try:
            self._quotas.check(admitted.adapter, self._clock())
        except Unavailable as error:
            self._metrics.by_adapter.limited(admitted.adapter)
            self._refuse(frontend, submit.id, error)
            return None
        generation = Generation(self._next_id, submit, admitted, self._clock())
        self._next_id = generation.ids.stop
        self._metrics.by_adapter.admitted(generation.adapter)
        self._quotas.opened(generation.adapter)
        self._open |= dict.fromkeys(generation.ids, (generation, frontend))
        self._of[frontend][submit.id] = generation
        self.num_queued += 1
        if submit.prompt_token_ids is None or admitted.params.bad_words:
            return generation
        self.tokenized(generation, submit.prompt_token_ids)
        return None

    def refuse_oversize(self, frontend: Frontend, client_id: int, num_bytes: int) -> None:
        """A request came that was too long to be read."""
        self._refuse(frontend, client_id, self._admission.oversize(num_bytes))

    def tokenized(self, generation: Generation, token_ids: list[int], bad_word_ids: Sequence[list[int]] = ()) -> None:
        """The prompt and the bad words of a request are tokenized. Does nothing if the request is over."""
        if not self.is_open(generation):
            return
        try:
            token_ids = self._admission.prompt(token_ids, generation.params)
        except QuireError as error:
            self.fail(generation, error)
        else:
            self._metrics.prompt_tokens(len(token_ids))
            self._quotas.took(generation.adapter, len(token_ids))
            for request in generation.begin(token_ids, self._tokenizer, list(bad_word_ids)):
                self._send(request)

    def fail(self, generation: Generation, error: QuireError) -> None:
        """End a request with an error. Does nothing if it is over."""
        if self.is_open(generation):
            _, frontend = self._open[self._sequences(generation)[0]]
            self._close(generation, frontend, "error")
            frontend.post(generation.failed(error.code, str(error)))

    def cancel(self, frontend: Frontend, client_ids: Iterable[int]) -> None:
        """A frontend wants no more events for some of its requests. Unknown ids are over already."""
        known = self._of[frontend]
        self._abort([known[i] for i in client_ids if i in known], frontend)

    def leave(self, frontend: Frontend) -> int:
        """A frontend is gone, and its requests with it. Returns how many were open."""
        generations = list(self._of[frontend].values())
        self._abort(generations, frontend)
        del self._of[frontend]
        return len(generations)

    def take(self, step: StepResult) -> None:
        """The engine core made a step."""
        now = self._clock()
        for id in step.started_ids:
            if (entry := self._open.get(id)) and not entry[0].started:
                self._start(entry[0], now)
        aborted = [id for result in step.results for id in self._take_result(result, now)]
        if aborted:
            self._send(AbortSequences(aborted))
        self._metrics.stats(step.stats)
        for move in step.adapter_events:
            self._moved(move)
        if step.stats.slot_adapters != self._slots:
            self._slots = step.stats.slot_adapters
            self._metrics.by_adapter.slots([name for d in self._slots for name in self._names.get(d, [])])

    def core_came(self) -> None:
        """The engine core is there: requests are taken."""
        self._admission.closed = ""
        self._metrics.core(True)

    def core_left(self) -> None:
        """The engine core is gone, and with it every open request; new ones are refused until it is back."""
        self._admission.closed = "engine core is restarting; try again"
        self._metrics.core(False)
        for generation in self._generations():
            self.fail(generation, Unavailable(self._admission.closed))

    def set_adapters(self, adapters: Mapping[str, str], limits: Mapping[str, AdapterLimits] | None = None) -> None:
        """Replace the table of adapter names, and their limits; open requests keep the digest that they began with."""
        self._quotas.set(limits or {}, self._clock())
        self._admission.adapters = dict(adapters)
        self._names = {}
        for name, digest in adapters.items():
            self._names.setdefault(digest, []).append(name)
        self._metrics.by_adapter.catalogue(adapters)
        self._slots = []
        early, self._early = self._early, deque(maxlen=_MAX_EARLY)
        for move in early:
            self._moved(move)

    def drain(self, on_empty: Callable[[], None]) -> None:
        """Refuse new requests from now on; call `on_empty` when no request is open."""
        self._admission.draining = True
        self._on_empty.append(on_empty)
        self._tell_if_empty()

    def note_adapters(self) -> None:
        """Bring the metrics' list of adapters in use up to date, before it is read."""
        running: set[str] = set()
        waiting: set[str] = set()
        for generation in self._generations():
            if generation.adapter is not None:
                (running if generation.started else waiting).add(generation.adapter)
        self._metrics.adapters(running, waiting)

    def status(self) -> dict[str, Any]:
        """Counts for the supervisor."""
        return {"num_open": self.num_open, "num_queued": self.num_queued, "core": not self._admission.closed}

    def _refuse(self, frontend: Frontend, client_id: int, error: QuireError) -> None:
        self._metrics.refused(error.code)
        frontend.post(OutputDelta(client_id, error_code=error.code, error=str(error)))

    def _moved(self, move: AdapterEvent) -> None:
        names = self._names.get(move.digest, [])
        if not names:
            # The core has an adapter before anyone is told its name.
            self._early.append(move)
        for name in names:
            self._metrics.by_adapter.moved(name, move)

    def _start(self, generation: Generation, now: float) -> None:
        generation.started = True
        self.num_queued -= 1
        self._metrics.started(generation.adapter, now - generation.arrival)

    def _take_result(self, result: SequenceDelta, now: float) -> list[int]:
        """Pass a result on. Returns the sequences that are over here while the engine core still runs them."""
        entry = self._open.get(result.id)
        if entry is None:
            return []
        generation, frontend = entry
        completion = generation.completion(result.id)
        num_before = completion.num_tokens
        events = generation.take(_again(result))
        self._measure(generation, completion, completion.num_tokens - num_before, now)
        aborted = []
        if completion.finish_reason is not None or result.error_code is not None:
            del self._open[result.id]
            aborted = [result.id] if result.finish_reason is None and result.error_code is None else []
        if events and events[-1].final:
            aborted += self._sequences(generation)
            self._close(generation, frontend, "error" if events[-1].error_code else events[-1].finish_reason or "")
        for event in events:
            frontend.post(event)
        return aborted

    def _measure(self, generation: Generation, completion: Completion, num_tokens: int, now: float) -> None:
        if not num_tokens:
            return
        if completion.last_token is not None:
            self._metrics.next_token(now - completion.last_token)
        elif all(other.last_token is None for other in generation.completions):
            self._metrics.first_token(generation.adapter, now - generation.arrival)
        completion.last_token = now
        self._metrics.tokens(generation.adapter, num_tokens)
        self._quotas.took(generation.adapter, num_tokens)

    def _abort(self, generations: list[Generation], frontend: Frontend) -> None:
        submitted = [id for generation in generations if generation.submitted for id in self._sequences(generation)]
        for generation in generations:
            self._close(generation, frontend, "abort")
        if submitted:
            self._send(AbortSequences(submitted))

    def _generations(self) -> list[Generation]:
        return [generation for generations in self._of.values() for generation in generations.values()]

    def _sequences(self, generation: Generation) -> list[int]:
        """Those whose output is not over."""
        return [id for id in generation.ids if id in self._open]

    def _close(self, generation: Generation, frontend: Frontend, reason: str) -> None:
        generation.over = True
        self._quotas.closed(generation.adapter)
        for id in self._sequences(generation):
            del self._open[id]
        del self._of[frontend][generation.client_id]
        if not generation.started:
            self.num_queued -= 1
        seconds = self._clock() - generation.arrival
        tokens = generation.num_input_tokens, generation.num_output_tokens
        self._metrics.finished(reason, seconds, *tokens, generation.params)
        self._tell_if_empty()

    def _tell_if_empty(self) -> None:
        if not self._open:
            waiting, self._on_empty = self._on_empty, []
            for tell in waiting:
                tell()


def _again(result: SequenceDelta) -> SequenceDelta:
    """A digest that the core does not know is one that a restarted core has yet to load: the name was found here."""
    if result.error_code != Code.NOT_FOUND:
        return result
    return replace(result, error_code=Code.UNAVAILABLE, error="the adapter is being loaded after a restart; try again")
