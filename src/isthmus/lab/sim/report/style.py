"""The page's style sheet. Hues stay apart for colour-blind readers; dashes, fillings and labels repeat them."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --ink: #1c1f23; --soft: #5b636d; --grid: #e3e6ea; --rule: #c9ced5;
  --blue: #1668a7; --orange: #c45a00; --green: #16805c; --red: #c0392b; --purple: #8e4aa0; --grey: #7d858f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --card: #1b1f24; --ink: #e6e9ed; --soft: #a2abb6; --grid: #2d333a; --rule: #434b55;
    --blue: #5aa9e6; --orange: #f0953f; --green: #44bd93; --red: #ee7264; --purple: #c58ad6; --grey: #8f98a3;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 40px 0 12px; }
h3 { font-size: 15px; margin: 0 0 6px; }
p { margin: 0 0 10px; max-width: 78ch; }
.soft, figcaption { color: var(--soft); font-size: 13.5px; }
figure { margin: 0 0 18px; padding: 16px 18px; background: var(--card); border: 1px solid var(--grid);
  border-radius: 8px; min-width: 0; }
figcaption { margin-bottom: 10px; max-width: 100ch; }
.scroll { overflow-x: auto; }
.pair { display: grid; align-items: start; gap: 0 18px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 490px), 1fr)); }
.tiles { display: grid; gap: 12px; margin: 20px 0;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.tile { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 24px; line-height: 1.25; font-weight: 600; }
.tile span { color: var(--soft); font-size: 13px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: 4px 0 4px 16px; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }
th { font-weight: 600; color: var(--soft); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tbody th { font-weight: 400; color: var(--ink); white-space: normal; min-width: 130px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; padding: 14px;
  overflow-x: auto; font: 13px/1.45 ui-monospace, "Cascadia Mono", Menlo, Consolas, monospace; }
svg { display: block; width: 100%; height: auto; min-width: 460px; overflow: hidden; }
svg.wide { min-width: 760px; }
svg text { font: 12px system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: var(--ink); }
svg .tick { fill: var(--soft); font-size: 11.5px; }
svg .row-title { font-weight: 600; }
svg path, svg circle { fill: none; }
.grid { stroke: var(--grid); } .axis { stroke: var(--rule); }
.prefill { --tone: var(--blue); } .decode { --tone: var(--orange); } .link { --tone: var(--purple); }
svg .area { fill: var(--tone); fill-opacity: .32; }
svg .line { stroke: var(--tone); stroke-width: 2; stroke-linejoin: round; }
svg .thin { stroke-width: 1; }
svg .dashed { stroke-dasharray: 7 4; } svg .dotted { stroke-dasharray: 2 3; }
svg .fill { fill: var(--tone); }
svg .faint { fill: var(--tone); fill-opacity: .28; stroke: var(--tone); stroke-dasharray: 3 2; }
svg .wait { fill: none; stroke: var(--grey); stroke-dasharray: 4 3; }
svg .dot { fill: var(--ink); }
svg .limit { stroke: var(--red); stroke-width: 1.5; stroke-dasharray: 6 4; }
svg .limit-label { fill: var(--red); font-weight: 600; }
svg .good { fill: var(--green); }
svg .missed { fill: var(--green); fill-opacity: .3; stroke: var(--green); stroke-width: .8; }
svg .refused-prefill { fill: var(--orange); }
svg .refused-decode { fill: var(--orange); fill-opacity: .3; stroke: var(--orange); stroke-width: .8; }
svg .failed { fill: var(--ink); }
svg .unfinished { fill: none; stroke: var(--grey); stroke-width: .8; }
@media print { figure, table { break-inside: avoid; } }
"""
