"""``kp-scorer cache``: show, warm, pin and empty the novelty logs."""

import io
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Final

import click
import numpy as np

from kp_scorer.cli.display import counted, progress
from kp_scorer.cli.input import read_files, read_traces
from kp_scorer.cli.options import service_options, yes_option
from kp_scorer.cli.output import print_note, print_row, refusal
from kp_scorer.cli.unpacking import open_input, read_bytes, texts_in, unpacked
from kp_scorer.embedding.embedder import CheckedEmbedder, Embedder, Vector
from kp_scorer.embedding.select import select_embedder
from kp_scorer.errors import InvalidTrace, Problem, ServiceUnavailable, SettingsError, TraceConflict
from kp_scorer.limits import Limits
from kp_scorer.local.processes import stopped_by_signals
from kp_scorer.novelty.pins import PinnedSet
from kp_scorer.novelty_meter import NoveltyMeter
from kp_scorer.settings import Settings
from kp_scorer.settings.sections import PIN_NAME, EmbeddingSettings, RecipeName
from kp_scorer.store import Store
from kp_scorer.store.novelty_log import LogInfo, RedisLog
from kp_scorer.store.pinned_sets import MOST_ENTRIES
from kp_scorer.trace import ReasoningTrace

_BEGINS_AS_JSON: Final = re.compile(rb"(\xef\xbb\xbf)?\s*(\{|\[\s*[\[{])")
_LOOK_EVERY_S: Final = 0.2
_NO_VECTOR: Final = Problem("$", "expected a text that the embedder has a vector for")


@click.group()
def cache() -> None:
    """Show, warm, pin or empty the shared novelty cache.

    Example: kp-scorer cache info
    """


@cache.command(epilog="Example: kp-scorer cache info")
@service_options
def info(settings: Settings) -> None:
    """Print size, age, model and window of each space, the number of traces that a gate keeps there, and its pinned sets."""
    with Store.open(settings) as store:
        for log in store.novelty_logs():
            state = log.info()
            row = {
                "space": state.space,
                "model": state.space.rpartition("-")[0],
                "entries": state.entries,
                "oldest_age_s": round(time.time() - state.oldest.time_ms / 1_000, 1) if state.oldest else None,
                "bytes": state.bytes,
                "window": state.window.as_settings() if state.window else None,
                "window_filled": _filled(state),
            }
            print_row(row)
        for facts in store.all_facts():
            print_row(facts.info())
        for pinned in store.all_pinned_sets():
            print_row(pinned)


def _filled(state: LogInfo) -> float:
    """Return the share of its window that a log fills, 0..1: by number or by age, whichever bounds the window first."""
    if not (state.window and state.oldest):
        return 0.0
    by_age = (time.time() * 1_000 - state.oldest.time_ms) / state.window.ttl_ms
    return round(max(0.0, min(1.0, max(state.entries / state.window.max_elements, by_age))), 3)


@cache.command(epilog="Example: kp-scorer cache warm --set novelty.recipe=asked_and_did")
@click.argument("file", metavar="[FILE|-]", required=False, type=click.Path(allow_dash=True))
@click.option("--yes", is_flag=True, help="Add to the space even if it has entries already.")
@service_options
def warm(file: str | None, yes: bool, settings: Settings) -> bool:
    """Fill the cache of a new space before workers use it.

    A space is new if the model, the recipe or the type of vectors has changed.

    Embeds traces with the settings that those workers will have, and decides nothing. Without FILE these are the traces that
    the present workers decide until Ctrl-C or SIGTERM. With FILE (- for standard input), in the form that `submit` reads, these
    are its last traces, as many as novelty.max_elements says. The age of an entry counts from now on. A trace that is submitted
    later is never compared with its own entry.

    Refuses a space that has entries already, unless --yes is given: new entries push those out of the window. Prints a JSON
    line for each trace that is invalid, that has no vector, or whose id is taken by other content, and one with the space, the
    number of traces added, and the number of entries in the space.
    """
    with Store.open(settings) as store:
        embedder = _embedder(settings.embedding, settings.novelty.recipe)
        log = store.novelty_log(embedder.space)
        if (entries := log.info().entries) and not yes:
            raise click.UsageError(f"{log.space} has {entries} entries already; with --yes these traces are added to them")
        meter = NoveltyMeter(embedder, log, settings.novelty.window())
        warmed, refused = _warm_from(file, store, meter, settings) if file else _follow(store, meter, log, settings)
        print_row({"space": log.space, "warmed": warmed, "entries": log.info().entries})
    return refused > 0


def _warm_from(file: str, store: Store, meter: NoveltyMeter, settings: Settings) -> tuple[int, int]:
    """Append the newest traces in a file; return how many were added and refused."""
    newest: deque[tuple[int, ReasoningTrace]] = deque(maxlen=settings.novelty.max_elements)
    refused = 0
    for line in read_files([file], settings.limits):
        if isinstance(line.trace, InvalidTrace):
            refused += 1
            print_row(refusal(line.number, line.trace), "")
        else:
            newest.append((line.number, line.trace))
    total, left = len(newest), iter(newest)
    batches = iter(lambda: list(islice(left, settings.worker.batch_size)), [])
    warmed = sum(warm_up(store, meter, batch) for batch in counted(batches, "warmed", total))
    if not total:
        print_note(f"no traces in {file}")
    return warmed, refused + total - warmed


def _follow(store: Store, meter: NoveltyMeter, log: RedisLog, settings: Settings) -> tuple[int, int]:
    """Append each trace that workers decide, until a signal comes; return how many were added and refused."""
    stopping = stopped_by_signals()
    warmed = read = 0
    store.copies.begin(stopping)
    try:
        print_note(f"warming {log.space} with what workers decide; Ctrl-C ends it")
        with progress("warmed") as advance:
            while (copies := store.copies.read(settings.worker.batch_size)) or not stopping.wait(_LOOK_EVERY_S):
                if not copies:
                    continue
                traces = [(read + at, each.trace) for at, each in enumerate(copies, 1) if each.trace]
                warmed, read = warmed + warm_up(store, meter, traces), read + len(copies)
                if erased := store.copies.remove(copies):
                    log.erase(*erased)
                advance(warmed, None)
    finally:
        store.copies.end()
    return warmed, read - warmed


def _embedder(embedding: EmbeddingSettings, recipe: RecipeName) -> Embedder:
    if embedder := select_embedder(embedding, recipe):
        return embedder
    raise SettingsError("embedding.embedder: nothing to embed with; install kp-scorer[embedding], or set it to words")


def warm_up(store: Store, meter: NoveltyMeter, traces: Sequence[tuple[int, ReasoningTrace]]) -> int:
    """Embed numbered traces together, append them in order and print those that are refused; return the number of the others.

    Raises ServiceUnavailable if Redis is nearly full.
    """
    # Appending may use the memory that Redis reserves for workers, and frees none. So go on only while Redis accepts
    # submissions.
    store.ledger.submit(())
    texts = [(number, meter.embedder.recipe.text(trace)) for number, trace in traces]
    embedded = zip(traces, _embedded(meter.checked_embedder, texts, plain=False), strict=True)
    candidates = [
        (number, meter.candidate(trace, trace.digests(), vector)) for (number, trace), vector in embedded if vector is not None
    ]
    places = meter.place([candidate for _, candidate in candidates])
    for (number, candidate), place in zip(candidates, places, strict=True):
        if place is None:
            print_row(refusal(number, TraceConflict(candidate.trace_id)), "")
    return sum(place is not None for place in places)


def _embedded(
    checked: CheckedEmbedder, texts: Sequence[tuple[int, str]], *, plain: bool, alone: bool = False
) -> Iterator[Vector | None]:
    """Embed numbered texts together or, if that fails, alone; yield each vector, or None for a text, which is then refused."""
    try:
        yield from checked.embed(checked.tokenize_all([text for _, text in texts], alone=alone, plain=plain), alone=alone)
    except ServiceUnavailable:
        raise
    except Exception:
        if not alone:
            for text in texts:
                yield from _embedded(checked, [text], plain=plain, alone=True)
            return
        ((number, _),) = texts
        print_row(refusal(number, InvalidTrace([_NO_VECTOR])), "")
        yield None


@cache.command(epilog="Example: kp-scorer cache pin benchmarks tasks.txt")
@click.argument("name")
@click.argument("file", metavar="FILE|-", type=click.Path(allow_dash=True))
@service_options
def pin(name: str, file: str, settings: Settings) -> bool:
    """Pin a set of traces or texts, so that novelty.pinned can keep similar traces out.

    FILE (- for standard input) holds traces as for `submit`, or a text on each line, such as the tasks of a benchmark. A pinned
    trace is compared with the whole of a trace, a pinned text with its objective.

    The set NAME belongs to the space of the settings, which should be those of the workers. It replaces an earlier set of this
    name for all workers at once, holds at most 100,000 entries, and never expires. A line whose text has no vector is left out.
    Prints a JSON line for each such line, and one that describes the set.
    """
    if not re.fullmatch(PIN_NAME, name):
        raise click.BadParameter("expected at most 64 letters, digits, '.', '_' and '-'", param_hint="NAME")
    with Store.open(settings) as store, open_input(file) as opened:
        embedder, stream = _embedder(settings.embedding, settings.novelty.recipe), unpacked(opened)
        is_json = _BEGINS_AS_JSON.match(read_bytes(stream.peek, 1))
        texts = list((_traces_in if is_json else _texts_in)(stream, embedder, settings.limits))
        if not 0 < len(texts) <= MOST_ENTRIES:
            raise click.BadParameter(f"expected 1 to {MOST_ENTRIES} traces or texts, got {len(texts)}", param_hint="FILE")
        checked, numbered = CheckedEmbedder(embedder), iter([(number, text) for number, _, text in texts])
        batches = iter(lambda: list(islice(numbered, settings.worker.batch_size)), [])
        by_batch = (_embedded(checked, batch, plain=not is_json) for batch in counted(batches, "embedded", len(texts)))
        entries = zip((entry_id for _, entry_id, _ in texts), chain.from_iterable(by_batch), strict=True)
        embedded = [(entry_id, vector) for entry_id, vector in entries if vector is not None]
        if not embedded:
            raise click.BadParameter("no text in it has a vector; nothing is pinned", param_hint="FILE")
        ids, vectors = zip(*embedded, strict=True)
        pinned = PinnedSet("traces" if is_json else "texts", ids, np.stack(vectors))
        # As for warming, Redis must have room for submissions.
        store.pinned_sets(embedder.space).replace(name, pinned, check_room=lambda: store.ledger.submit(()))
        (described,) = (row for row in store.all_pinned_sets() if (row["space"], row["name"]) == (embedder.space, name))
        print_row(described)
    return len(embedded) < len(texts)


def _traces_in(stream: io.BufferedReader, embedder: Embedder, limits: Limits) -> Iterator[tuple[int, str, str]]:
    for line in read_traces(stream, limits):
        if isinstance(line.trace, InvalidTrace):
            raise click.BadParameter(f"line {line.number}: {line.trace}; nothing is pinned", param_hint="FILE")
        yield line.number, line.trace.id, embedder.recipe.text(line.trace)


def _texts_in(stream: io.BufferedReader, _: Embedder, limits: Limits) -> Iterator[tuple[int, str, str]]:
    for number, text in texts_in(stream, 4 * limits.field_chars + 4, "FILE"):
        if len(text) > limits.field_chars:
            raise click.BadParameter(f"line {number}: expected at most {limits.field_chars} characters", param_hint="FILE")
        yield number, str(number), text


@cache.command(epilog="Example: kp-scorer cache unpin benchmarks")
@click.argument("name")
@service_options
def unpin(name: str, settings: Settings) -> None:
    """Remove the pinned set NAME from every space. Workers whose settings name it stop deciding."""
    with Store.open(settings) as store:
        if not (sets := [row for row in store.all_pinned_sets() if row["name"] == name]):
            raise click.BadParameter("no set has this name; `kp-scorer cache info` lists them", param_hint="NAME")
        for row in sets:
            store.pinned_sets(str(row["space"])).remove(name)
            print_note(f"removed {row['entries']} entries of {name} in {row['space']}")


@cache.command(epilog="Example: kp-scorer cache clear --yes")
@yes_option
@service_options
def clear(yes: bool, settings: Settings) -> None:
    """Empty the cache: the next traces are compared with nothing, not even with kept traces. Decisions stay."""
    with Store.open(settings) as store:
        entries = ((f"{log.info().entries} entries of {log.space}", log.clear) for log in store.novelty_logs())
        facts = ((f"{each.info()['kept']} kept traces of {each.space}", each.clear) for each in store.all_facts())
        for words, remove in chain(entries, facts):
            if yes or click.confirm(f"Remove the {words}?", err=True):
                remove()
                print_note(f"removed {words}")
