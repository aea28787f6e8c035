"""The stage that embeds: each stream of the engine takes the next texts as soon as it is free."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Final

from kp_scorer.decider import Decider, ms_since
from kp_scorer.embedding.embedder import TokenizedText, Vector, rounded_up
from kp_scorer.novelty_meter import NoveltyMeter
from kp_scorer.process.admission import Admission, Sink
from kp_scorer.process.delivery import Delivery
from kp_scorer.process.metrics import Metrics
from kp_scorer.process.watchdog import StallTimer, VitalThread
from kp_scorer.trace import ReasoningTrace

_GROUP: Final = 16
"""With 16 or more texts waiting, forward vectors 16 at a time: one by one they would cost the later stages 2 ms each."""


_Key = tuple[str, str | None]  # A text, and the objective that is embedded as well if texts are pinned.


@dataclass(eq=False, slots=True)
class _Text:
    """A text that waits for a pass or is in one, and the deliveries with that text."""

    key: _Key
    tokenized: TokenizedText
    objective: TokenizedText | None
    longest: int  # The tokens of its longest part, or of the objective if that is longer.
    rounded_lengths: Sequence[int]  # Rounded lengths of its parts and of the objective; empty if any texts may share a pass.
    deliveries: list[Delivery]
    put_at: float = field(default_factory=time.perf_counter)


class EmbedStage:
    """Embeds texts in continuous batches: no pass waits for another to form, and no text for others that came with it.

    The text whose turn it is goes first, and takes along as many of those behind it as fit; if the engine pads, only those of
    its rounded length. So neither long nor short texts starve. A text goes on as soon as it has its vector, unless there is a
    backlog.
    """

    def __init__(self, admission: Admission, decider: Decider, novelty: NoveltyMeter, metrics: Metrics, pass_on: Sink) -> None:
        """Start a thread for each pass that may run; ``pass_on`` gets deliveries whose traces have vectors."""
        self._admission = admission
        self._decider = decider
        self._novelty = novelty
        self._embedder = novelty.embedder
        self._checked = novelty.checked_embedder
        self._metrics = metrics
        self._pass_on = pass_on
        self._changed = threading.Condition()
        self._waiting: list[_Text] = []
        self._by_text: dict[_Key, _Text] = {}
        metrics.texts_in_flight.set_function(lambda: len(self._by_text))
        self._embedded: list[Delivery] = []
        self._running = 0
        self._runs_together = False
        self._is_stopping = False
        self.threads = [VitalThread(self._run, f"stream-{n}") for n in range(self._embedder.most_passes)]
        for thread in self.threads:
            thread.start()

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Queue traces to be embedded, each as soon as a stream is free. Only one thread may call this."""
        # An engine that packs takes many texts in a pass. Otherwise a stream begins with the first before the others are
        # tokenized.
        for group in [deliveries] if self._embedder.packs else [[each] for each in deliveries]:
            self._put(group)

    def stop(self) -> None:
        """End the threads once no text waits."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def _put(self, deliveries: Sequence[Delivery]) -> None:
        new: dict[_Key, list[Delivery]] = {}
        with self._changed:
            for delivery in deliveries:
                assert isinstance(delivery.trace, ReasoningTrace), "no other submission is embedded"
                key = self._embedder.recipe.text(delivery.trace), self._novelty.objective_of(delivery.trace)
                same = self._by_text.get(key)
                (same.deliveries if same else new.setdefault(key, [])).append(delivery)
        try:
            texts = self._tokenized(new, alone=deliveries[0].is_alone)
        except Exception as error:
            self._fail([delivery for each in new.values() for delivery in each], error)
            return
        with self._changed:
            self._by_text |= {text.key: text for text in texts}
            self._waiting += texts
            # In this order, a trace from an idle queue waits only for the running passes, not for all texts of other queues.
            self._waiting.sort(key=lambda text: text.deliveries[0].turn)
            self._changed.notify(len(texts))

    def _tokenized(self, new: Mapping[_Key, list[Delivery]], *, alone: bool) -> list[_Text]:
        tokenized = self._checked.tokenize_all([text for text, _ in new], alone=alone)
        texts_of = [objective for _, objective in new if objective is not None]
        objectives = self._checked.tokenize_all(texts_of, alone=alone, plain=True) if texts_of else repeat(None)
        texts = []
        for (key, deliveries), own, objective in zip(new.items(), tokenized, objectives, strict=False):
            lengths = list(map(len, [*own.rows, *(objective.rows if objective else ())]))
            rounded = [] if self._embedder.packs else [rounded_up(length, self._embedder.step) for length in lengths]
            texts.append(_Text(key, own, objective, max([0, *lengths]), rounded, deliveries))
        return texts

    def _run(self, stall: StallTimer) -> None:
        while next_pass := self._next_pass():
            stall.start()
            self._embed(*next_pass)
            stall.stop()

    def _next_pass(self) -> tuple[Sequence[_Text], bool] | None:
        """Wait for the texts of a stream's next pass; return them, and whether it gets all cores; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._can_start() or (self._is_stopping and not self._waiting))
            if not self._waiting:
                return None
            # After an abort, fail everything that still waits in one pass: releasing its leases then takes one round trip.
            texts, self._waiting = self._form_pass() if not self._admission.is_aborted else (self._waiting, [])
            streams = self._embedder.streams
            # If most streams would be idle, the texts are embedded sooner by passes that run one after another on all cores. A
            # GPU has no streams to share: a packed pass queues behind the one that runs.
            is_lone = not self._running and len(self._waiting) < streams // 2
            together = streams == 1 or (is_lone and not self._embedder.packs)
            self._running += 1
            self._runs_together = together
            return texts, together

    def _can_start(self) -> bool:
        if not self._waiting or self._runs_together:
            return False
        # A pass that is already queued in the engine starts without waiting for Python, but can no longer have all cores.
        return self._running < self._embedder.streams or len(self._waiting) >= self._embedder.most_passes

    def _form_pass(self) -> tuple[list[_Text], list[_Text]]:
        """Return the texts of the next pass, and those that keep waiting."""
        first = self._waiting[0]
        texts: list[_Text] = []
        left: list[_Text] = []
        longest = packed = 0
        for text in self._waiting:
            longer = max(longest, text.longest)
            tokens = packed + text.longest if self._embedder.packs else (len(texts) + 1) * longer
            if text is first or (text.rounded_lengths == first.rounded_lengths and tokens <= self._embedder.max_tokens):
                texts.append(text)
                longest, packed = longer, packed + text.longest
            else:
                left.append(text)
        return texts, left

    def _embed(self, texts: Sequence[_Text], together: bool) -> None:
        started = time.perf_counter()
        vectors: Sequence[tuple[Vector, Vector | None]] = ()
        failure: Exception | None = None
        try:
            self._admission.raise_if_aborted()
            vectors = self._run_pass(texts, together)
        except Exception as error:
            failure = error
        embed_ms = ms_since(started)
        with self._changed:
            self._running -= 1
            self._runs_together = False
            for text in texts:
                del self._by_text[text.key]
            for text, (vector, objective) in zip(texts, vectors, strict=False):
                wait_ms = round((started - text.put_at) * 1_000, 3)
                for pending in [delivery.pending for delivery in text.deliveries]:
                    pending.vector, pending.objective_vector, pending.tokens = vector, objective, text.tokenized.counts
                    pending.times_ms |= {"wait_ms": wait_ms, "embed_ms": embed_ms}
                self._embedded += text.deliveries
            embedded: list[Delivery] = []
            if len(self._waiting) < _GROUP or len(self._embedded) >= _GROUP:
                embedded, self._embedded = self._embedded, embedded
            self._changed.notify_all()
        if failure:
            self._fail([delivery for text in texts for delivery in text.deliveries], failure)
        if embedded:
            self._pass_on(embedded)

    def _run_pass(self, texts: Sequence[_Text], together: bool) -> list[tuple[Vector, Vector | None]]:
        """Embed texts and their objectives; return for each text its vector, and that of its objective or None."""
        metrics, started = self._metrics, time.perf_counter()
        tokenized, objectives = [text.tokenized for text in texts], [text.objective for text in texts if text.objective]
        run = partial(self._checked.run, together=together, alone=texts[0].deliveries[0].is_alone)
        vectors = run(tokenized)
        # Objectives have a pass of their own: padded to the length of the texts, they would take as long as these.
        of_objectives = iter(run(objectives) if objectives else ())
        metrics.pass_s.observe(time.perf_counter() - started)
        metrics.pass_texts.observe(len(texts))
        metrics.pass_tokens.observe(sum(each.tokens for each in (*tokenized, *objectives)))
        for text in texts:
            metrics.pass_wait_s.observe(started - text.put_at)
        return [(vector, next(of_objectives) if text.objective else None) for text, vector in zip(texts, vectors, strict=True)]

    def _fail(self, deliveries: Sequence[Delivery], error: Exception) -> None:
        self._decider.ledger.release([delivery.pending.trace.id for delivery in deliveries])
        self._admission.fail(deliveries, error)
