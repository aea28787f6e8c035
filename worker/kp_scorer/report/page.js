// Draws each chart into the element that it names, one after the other, and says on the page when all are drawn.
const settings = {
  actions: false,
  ast: true, // evaluates expressions without eval, which the page's policy forbids
  defaultStyle: false, // its styles would come in an element that the policy forbids; page.css has what is needed
  mode: "vega-lite",
  renderer: "svg", // so that colours are those of page.css, dark or light
  tooltip: { disableDefaultStyle: true, theme: "own" },
};

async function drawAll() {
  const { config, charts } = JSON.parse(document.getElementById("charts").textContent);
  for (const [id, spec] of Object.entries(charts)) {
    await vegaEmbed(document.getElementById(id), spec, { ...settings, config });
  }
}

const state = document.documentElement.dataset;
drawAll().then(
  () => { state.charts = "drawn"; },
  (error) => { state.charts = "failed"; console.error(error); },
);
