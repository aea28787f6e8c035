// Draws each chart into the element with its id, one after the other, and marks the page when all are drawn.
const config = {
  background: "transparent",
  font: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif",
  padding: { left: 0, right: 8, top: 4, bottom: 4 },
  view: { stroke: null },
  axis: {
    labelColor: "var(--muted)",
    titleColor: "var(--muted)",
    titleFontWeight: "normal",
    labelFontSize: 11,
    titleFontSize: 11,
    gridColor: "var(--line)",
    domainColor: "var(--line)",
    ticks: false,
    labelPadding: 6,
    labelLimit: 130,
  },
  axisX: { grid: false, labelFlush: true },
  axisY: { domain: false, minExtent: 24 },
  text: { fill: "var(--ink)", fontSize: 11 },
  rule: { stroke: "var(--ink)" },
};

// For each kind of chart, a function from its figures to a Vega-Lite specification. No chart depends on colour alone.
const charts = {
  // The histogram of scores, in which the outcomes are stacked, with the thresholds.
  scores: ({ thresholds, outcomes }) => {
    const rows = outcomes.flatMap(([, outcome, counts], order) => bins(counts, { outcome, order }));
    const most = Math.max(...outcomes[0][2].map((_, bin) => outcomes.reduce((sum, [, , counts]) => sum + counts[bin], 0)));
    const domain = outcomes.map(([, words]) => words);
    const coloured = (ending) => ({
      field: "outcome", type: "nominal", legend: null,
      scale: { domain, range: outcomes.map(([name]) => `var(--${name}${ending})`) },
    });
    const bars = {
      mark: { type: "bar", binSpacing: 1, strokeWidth: 1 },
      encoding: {
        ...binned(outcomes[0][2], most), fill: coloured("-fill"), stroke: coloured(""),
        order: { field: "order", type: "quantitative" },
        tooltip: [...binTooltip, { field: "outcome" }, { field: "traces" }],
      },
    };
    return { ...sized(rows, 120), layer: [bars, ...thresholdMarks(thresholds)] };
  },

  // The histogram of a dimension.
  dimension: ({ counts }) => ({
    ...sized(bins(counts), 110),
    mark: { type: "bar", binSpacing: 1, fill: "var(--accent)" },
    encoding: { ...binned(counts, Math.max(...counts)), tooltip: [...binTooltip, { field: "traces" }] },
  }),

  // The share of all traces that each threshold from 0 to 1 would accept.
  acceptance: ({ thresholds, shares }) => {
    const rows = shares.map((share, place) => ({ threshold: place / (shares.length - 1), share }));
    const curve = {
      mark: { type: "area", line: { stroke: "var(--accent)", strokeWidth: 2 }, fill: "var(--band)" },
      encoding: {
        x: { field: "threshold", type: "quantitative", axis: { title: "threshold", format: ".1f", tickCount: 6 } },
        y: { field: "share", type: "quantitative", axis: { title: "accepted", format: ".0%", tickCount: 5 } },
        tooltip: [{ field: "threshold", format: ".2f" }, { field: "share", title: "accepted", format: ".1%" }],
      },
    };
    return { ...sized(rows, 160), layer: [curve, ...thresholdMarks(thresholds)] };
  },

  // The novelty of single traces in their order, and the quartiles of consecutive stretches.
  novelty: ({ stretches, points }) => {
    const steps = stretches.flatMap(([first, last, [p25, p50, p75]]) =>
      [first - 0.5, last + 0.5].map((place) => ({ place, p25, p50, p75 })));
    const x = {
      field: "place", type: "quantitative",
      scale: { domain: [0.5, steps.at(-1).place], nice: false },
      axis: { title: "traces, in the order in which they came", format: ",d", tickCount: 5, tickMinStep: 1 },
    };
    const y = { type: "quantitative", scale: { domain: [0, 1] }, axis: { title: "novelty", format: ".1f", tickCount: 5 } };
    const band = {
      mark: { type: "area", fill: "var(--band)" },
      encoding: { x, y: { ...y, field: "p25" }, y2: { field: "p75" } },
    };
    const line = {
      mark: { type: "line", stroke: "var(--accent)", strokeWidth: 2 },
      encoding: { x, y: { ...y, field: "p50" } },
    };
    const dots = {
      data: { values: points.map(([place, novelty]) => ({ place, novelty })) },
      mark: { type: "point", size: 14, filled: true, fill: "var(--ink)", fillOpacity: 0.45 },
      encoding: {
        x, y: { ...y, field: "novelty" },
        tooltip: [{ field: "place", format: ",d" }, { field: "novelty", format: ".2f" }],
      },
    };
    return { ...sized(steps, 220), layer: [band, dots, line] };
  },

  // Traces in two dimensions, the dropped ones below the kept ones.
  map: ({ points }) => {
    const place = (field) => ({ field, type: "quantitative", axis: null, scale: { zero: false } });
    const coloured = {
      field: "outcome", type: "nominal", title: null,
      scale: { domain: ["succeeded", "failed"], range: ["var(--accent)", "var(--review)"] },
    };
    return {
      ...sized(points, 420),
      mark: { type: "point", cursor: "pointer", strokeWidth: 1.2 },
      encoding: {
        x: place("x"), y: place("y"), stroke: coloured,
        fill: { condition: { test: "datum.kept", ...coloured, legend: null }, value: "transparent" },
        shape: { field: "outcome", type: "nominal", scale: { domain: ["succeeded", "failed"], range: ["circle", "cross"] } },
        size: { condition: { test: "datum.kept", value: 90 }, value: 22 },
        tooltip: ["domain", "outcome", "objective"].map((field) => ({ field })),
      },
    };
  },
};

// As wide as the page allows, with a height in pixels.
const sized = (values, height) => (
  { data: { values }, width: "container", height, autosize: { type: "fit-x", contains: "padding" } });

const bins = (counts, more) => counts.flatMap((traces, bin) =>
  traces ? [{ from: bin / counts.length, to: (bin + 1) / counts.length, traces, ...more }] : []);

const binTooltip = [{ field: "from", format: ".2f" }, { field: "to", format: ".2f" }];

function binned(counts, most) {
  const ticks = Math.min(3, Math.max(1, most)); // no tick between two counts
  return {
    x: {
      field: "from",
      bin: { binned: true, step: 1 / counts.length },
      scale: { domain: [0, 1] },
      axis: { title: null, format: ".1f", values: [0, 0.2, 0.4, 0.6, 0.8, 1] },
    },
    x2: { field: "to" },
    y: {
      field: "traces", type: "quantitative", scale: { nice: ticks },
      axis: { title: null, tickCount: ticks, format: most < 10000 ? ",d" : "~s" },
    },
  };
}

// A line for each threshold, with its label beside it; labels are one below the other.
const thresholdMarks = (thresholds) => thresholds.flatMap((threshold, place) => {
  const data = { values: [{ threshold, label: String(Number(threshold.toPrecision(6))) }] };
  const x = { field: "threshold", type: "quantitative" };
  const beside = threshold > 0.5 ? { align: "right", dx: -4 } : { align: "left", dx: 4 };
  const text = { type: "text", baseline: "top", y: 12 * place, fontWeight: "bold", ...beside };
  return [
    { data, mark: { type: "rule", strokeDash: [4, 3] }, encoding: { x } },
    { data, mark: text, encoding: { x, text: { field: "label" } } },
  ];
});

// Shows a trace below the chart in which it was clicked; as text, whatever it holds.
function showTrace(place, { id, kept, outcome, objective, steps, result }) {
  const written = (name, text) => Object.assign(document.createElement(name), { textContent: text });
  const list = document.createElement("ol");
  list.append(...steps.map((step) => written("li", step)));
  place.replaceChildren(
    written("h4", objective), written("p", `${id}: ${kept ? "kept" : "dropped"}, ${outcome}`), list, written("p", result));
}

const settings = {
  config,
  actions: false,
  ast: true, // evaluates expressions without eval, which the policy of the page forbids
  defaultStyle: false, // the policy forbids its style element; page.css has the styles
  mode: "vega-lite",
  renderer: "svg", // so that page.css sets the colours, dark or light
  tooltip: { disableDefaultStyle: true, theme: "own" },
};

async function drawAll() {
  const figures = JSON.parse(document.getElementById("charts").textContent);
  for (const [id, chart] of Object.entries(figures)) {
    const place = document.getElementById(id);
    const { view } = await vegaEmbed(place, charts[chart.kind](chart), settings);
    view.addEventListener("click", (_, item) => item?.datum?.steps && showTrace(place.nextElementSibling, item.datum));
  }
}

const state = document.documentElement.dataset;
drawAll().then(
  () => { state.charts = "drawn"; },
  (error) => { state.charts = "failed"; console.error(error); },
);
