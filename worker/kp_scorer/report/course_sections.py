"""Sections on what goes on: novelty as traces come, how many decisions were made when, and how long they took."""

from kp_scorer.analysis.tempo import Throughput, moment
from kp_scorer.analysis.whole import Analysis
from kp_scorer.report.course_charts import latency_chart, novelty_chart, throughput_chart
from kp_scorer.report.markup import joined
from kp_scorer.report.sections import Section, figure, folded, grid, lead, table
from kp_scorer.report.words import STAGE_WORDS, duration, plural


def novelty_section(analysis: Analysis) -> Section:
    """How novelty goes as traces come."""
    stretches = analysis.novelty.stretches
    if not stretches:
        body = lead("No trace was compared with others: there was no embedder, so every novelty is 0.5.")
        return Section("novelty", "Novelty", "Novelty was not measured", body, {})
    first, last = stretches[0], stretches[-1]
    heading = (
        f"Novelty went from {first.p50:.2f} to {last.p50:.2f} as traces came"
        if len(stretches) > 1
        else f"Half of the traces have a novelty of {first.p50:.2f} or less"
    )
    says = f"The median of novelty is {first.p50:.2f} among the first traces and {last.p50:.2f} among the last."
    rows = [[f"{each.first:,} to {each.last:,}", f"{each.p25:.2f}", f"{each.p50:.2f}", f"{each.p75:.2f}"] for each in stretches]
    body = joined(
        lead("Each dot is a trace. The line is the median of those around it; half of them lie within the band."),
        grid([figure("novelty-course", "Novelty", "1 is like nothing before, 0 is a repeat", says)], "whole"),
        folded("Novelty as a table", table("Novelty in the order of traces", ["traces", "25%", "median", "75%"], rows)),
    )
    return Section("novelty", "Novelty", heading, body, {"novelty-course": novelty_chart(analysis.novelty)})


def tempo_section(analysis: Analysis, throughput: Throughput) -> Section:
    """How many decisions were made when, and how long their batches took."""
    peak, span = max(throughput.counts), duration(throughput.width_s)
    whole = duration(len(throughput.counts) * throughput.width_s)
    count = sum(throughput.counts)
    over_time = figure(
        "tempo-throughput",
        "Throughput",
        f"decisions in each {span}",
        f"{plural(count, 'decision')} within {whole}, at most {peak:,} in {span}.",
    )
    took = ", ".join(f"{STAGE_WORDS[each.stage]} {each.p50:,.1f} ms" for each in analysis.latencies)
    how_long = figure("tempo-latency", "Latency", "time that batches spent in each stage", f"For half of the traces: {took}.")
    latencies = [
        [STAGE_WORDS[each.stage], f"{each.p50:,.1f}", f"{each.p95:,.1f}", f"{each.p99:,.1f}"] for each in analysis.latencies
    ]
    spans = [
        [f"{moment(throughput.start_s + number * throughput.width_s):%Y-%m-%d %H:%M:%S}", f"{each:,}"]
        for number, each in enumerate(throughput.counts)
        if each
    ]
    body = joined(
        lead("By the clocks of the workers. A batch takes its time for all of its traces together."),
        grid([over_time, how_long], "wide"),
        folded(
            "Throughput and latency as tables",
            table("Latency in milliseconds, at most, for a share of traces", ["stage", "half", "95%", "99%"], latencies),
            table("Decisions over time", [f"{span} from, UTC", "decisions"], spans),
        ),
    )
    charts = {"tempo-throughput": throughput_chart(throughput), "tempo-latency": latency_chart(analysis.latencies)}
    return Section("tempo", "Throughput", f"At most {plural(peak, 'decision')} in {span}", body, charts)
