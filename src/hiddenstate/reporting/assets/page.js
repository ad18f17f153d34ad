/* Glue between the page and plotly: draws each figure when it is first seen, in the colors of the theme. */
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const figures = [...document.querySelectorAll(".plot")];
  const themes = JSON.parse(document.getElementById("themes").textContent);
  let printing = false;

  const draw = async (holder) => {
    const theme = themes[dark.matches && !printing ? "dark" : "light"];
    const source = document.getElementById(holder.dataset.figure).textContent;
    const { data, layout, orders } = JSON.parse(source, (_, value) => (typeof value === "string" && theme[value]) || value);
    const order = orders?.[document.querySelector(`select[data-orders="${holder.id}"]`)?.value];
    if (order) { data[0].z = order.map((line) => data[0].z[line]); data[0].y = order.map((line) => data[0].y[line]); }
    const axis = { gridcolor: theme["@@grid"], zerolinecolor: theme["@@grid"], linecolor: theme["@@grid"], automargin: true };
    for (const side of ["xaxis", "yaxis"]) if (layout[side]?.title) layout[side].title.standoff = 14;
    await Plotly.react(holder, data, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      // Room above for the buttons: where nothing hovers, plotly shows them always.
      margin: { l: 56, r: 12, t: 34, b: 48 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: theme["@@muted"], activecolor: theme["@@ink"] }, hovermode: "closest", dragmode: touch ? false : "zoom",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: theme["@@ink"] },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
      ...layout, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
    }, { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
    holder.dataset.drawn = "yes";
  };

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !entry.target.dataset.drawn) draw(entry.target);
  }, { rootMargin: "400px" });
  figures.forEach((holder) => seen.observe(holder));

  document.querySelectorAll("select[data-orders]").forEach((choice) => {
    choice.addEventListener("change", () => draw(document.getElementById(choice.dataset.orders)));
  });

  const again = () => figures.filter((holder) => holder.dataset.drawn).forEach(draw);
  dark.addEventListener("change", again);
  addEventListener("beforeprint", () => {
    printing = true;
    document.querySelectorAll(".finding").forEach((finding) => { finding.open = true; });
    figures.filter((holder) => holder.offsetParent).forEach(draw);
  });
  addEventListener("afterprint", () => { printing = false; again(); });
})();
