// Draws the charts, and shows the steps and the pointer of one in all others. Where it is touched, the page scrolls.
const config = { responsive: true, displayModeBar: false };
const touched = matchMedia("(pointer: coarse)").matches;
const charts = JSON.parse(document.getElementById("charts").textContent);
for (const { id, data, layout } of charts) {
  const plot = document.getElementById(id);
  Plotly.newPlot(plot, data, { ...layout, dragmode: touched ? false : "zoom" }, config);
  plot.parentNode.querySelector("button")?.addEventListener("click", () => {
    Plotly.relayout(plot, { "yaxis.type": plot.layout.yaxis.type === "log" ? "linear" : "log", "yaxis.autorange": true });
  });
}
const linked = charts.filter((chart) => chart.over_steps).map(({ id }) => document.getElementById(id));
for (const plot of linked) {
  const others = linked.filter((other) => other !== plot);
  plot.on("plotly_relayout", () => {
    const range = [...plot.layout.xaxis.range];
    for (const other of others)
      if (String(other.layout.xaxis.range) !== String(range)) Plotly.relayout(other, { "xaxis.range": range });
  });
  plot.on("plotly_hover", ({ points }) => others.forEach((other) => Plotly.Fx.hover(other, { xval: points[0].x }, "xy", true)));
  plot.on("plotly_unhover", () => others.forEach((other) => Plotly.Fx.unhover(other)));
}
