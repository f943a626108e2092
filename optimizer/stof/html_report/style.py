# SPDX-License-Identifier: Apache-2.0
"""The style sheet of the page: fonts of the system, light or dark as the reader's system is, and one column on a phone."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #fff; --line: #dfe3e8; --text: #1b2430; --quiet: #5a6675;
  --accent: #1f6feb; --accent-soft: #9cc3fb; --empty: #eceff3; --before: #b6bfca;
  --c0: #1f6feb; --c1: #b35900; --c2: #6f42c1; --c3: #11703c; --c4: #a8327d; --c5: #5a6675;
  --good: #11703c; --good-soft: #dcf3e5; --bad: #b3261e; --bad-soft: #fbe2e0; --kept: #6b4e00; --kept-soft: #fbefcc;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #11151b; --card: #1a2029; --line: #303947; --text: #e6eaf0; --quiet: #9aa7b6;
    --accent: #5ea1ff; --accent-soft: #2a4f82; --empty: #242c37; --before: #56616f;
    --c0: #5ea1ff; --c1: #f0a45b; --c2: #b89aff; --c3: #7fdca4; --c4: #f28fd0; --c5: #9aa7b6;
    --good: #7fdca4; --good-soft: #173625; --bad: #ff9d95; --bad-soft: #45201d; --kept: #f0cf72; --kept-soft: #3a3014;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem clamp(0.75rem, 3vw, 2rem) 3rem; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 0.75rem; }
h3 { font-size: 0.95rem; margin: 0; }
p { margin: 0.25rem 0; }
code, .code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 0.86em; overflow-wrap: anywhere; }
.lede { color: var(--quiet); overflow-wrap: anywhere; }
.quiet { color: var(--quiet); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: 0.75rem; margin-top: 1.25rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 0.8rem 1rem; min-width: 0; }
.card .label { color: var(--quiet); font-size: 0.85rem; }
.card .value { font-size: clamp(1.15rem, 4.5vw, 1.45rem); font-weight: 650; line-height: 1.3; overflow-wrap: anywhere; }
.card .more { color: var(--quiet); font-size: 0.85rem; overflow-wrap: anywhere; }
.good .value { color: var(--good); } .bad .value { color: var(--bad); }
.callout { background: var(--kept-soft); color: var(--kept); border-radius: 10px; padding: 0.6rem 1rem; margin: 0.75rem 0; }
.callout { overflow-wrap: anywhere; }
.callout.bad { background: var(--bad-soft); color: var(--bad); }
.loss { color: var(--bad); }
.chart { margin-top: 0.5rem; }
.chart .legend { margin-bottom: 0.5rem; }
.canvas { position: relative; height: 15rem; margin: 0.5rem 3.2rem 1.9rem 2.9rem; }
.canvas svg { position: absolute; inset: 0; width: 100%; height: 100%; border: 1px solid var(--line); overflow: visible; }
.canvas path { fill: none; vector-effect: non-scaling-stroke; stroke-width: 2; }
.canvas .grid { stroke: var(--line); stroke-width: 1; } .canvas .one { stroke: var(--quiet); stroke-width: 1.5; }
.canvas .losses { fill: var(--bad-soft); opacity: 0.55; }
.canvas .estimated.line { stroke-dasharray: 5 4; }
.canvas span { position: absolute; font-size: 0.78rem; line-height: 1; white-space: nowrap; }
.canvas .tick { color: var(--quiet); font-variant-numeric: tabular-nums; }
.canvas .y { right: calc(100% + 0.4rem); transform: translateY(-50%); }
.canvas .x { top: calc(100% + 0.45rem); transform: translateX(-50%); }
.canvas .dot { width: 9px; height: 9px; border-radius: 50%; transform: translate(-50%, -50%); }
.canvas .dot.estimated { width: 6px; height: 6px; }
.canvas .mark { font-weight: 650; padding: 0 0.5rem; background: none; }
.canvas .mark.left { transform: translate(-100%, -120%); } .canvas .mark.right { transform: translate(0, -120%); }
.c0 { --own: var(--c0); } .c1 { --own: var(--c1); } .c2 { --own: var(--c2); }
.c3 { --own: var(--c3); } .c4 { --own: var(--c4); } .c5 { --own: var(--c5); }
.canvas .line { stroke: var(--own); } .canvas .dot { background: var(--own); }
.key { display: inline-block; width: 1.5rem; margin-right: 0.4rem; vertical-align: 0.2rem; border-top: 3px solid var(--own); }
.key.estimated { border-top-style: dashed; border-top-width: 2px; }
.axis-name { color: var(--quiet); font-size: 0.8rem; text-align: center; }
.masks { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(17rem, 100%), 1fr)); gap: 0.75rem; }
.masks > .wide { grid-column: 1 / -1; }
.mask { margin: 0; display: flex; flex-direction: column; gap: 0.5rem; }
.mask figcaption { display: flex; flex-direction: column; gap: 0.15rem; order: 2; font-size: 0.87rem; }
.mask ul { margin: 0; padding-left: 1.1rem; color: var(--quiet); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(9rem, 100%), 1fr)); gap: 0.75rem; }
.plot { max-width: 16rem; width: 100%; min-width: 0; }
.plot .frame { display: grid; grid-template-columns: 1rem minmax(0, 1fr); gap: 0.15rem; }
.plot .axis { display: flex; justify-content: space-between; color: var(--quiet); font-size: 0.72rem; line-height: 1rem; }
.plot .x { grid-column: 2; } .plot .y { writing-mode: vertical-rl; }
.plot svg { display: block; width: 100%; height: auto; border: 1px solid var(--line); }
.plot .name { font-size: 0.8rem; color: var(--quiet); padding-left: 1.15rem; }
.none { fill: var(--empty); } .some { fill: var(--accent-soft); } .all { fill: var(--accent); }
.legend { display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; color: var(--quiet); font-size: 0.87rem; margin-bottom: 0.75rem; }
.legend svg { width: 0.8rem; height: 0.8rem; vertical-align: -0.08rem; margin-right: 0.35rem; border: 1px solid var(--line); }
.bars { display: grid; gap: 0.9rem; }
.bar-title { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; font-size: 0.9rem; }
.bar-title span { overflow-wrap: anywhere; min-width: 0; }
.bar-title b { white-space: nowrap; }
.bar { display: grid; grid-template-columns: 4.7rem minmax(0, 1fr) 5.2rem; gap: 0.5rem; align-items: center; font-size: 0.8rem; }
.bar > span { color: var(--quiet); white-space: nowrap; }
.bar > span:last-child { text-align: right; }
.track { display: block; height: 0.7rem; }
.track i { display: block; height: 100%; border-radius: 3px; background: var(--before); min-width: 2px; }
.track .after { background: var(--accent); } .track .lost { background: var(--bad); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 10px; background: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: 0.87rem; }
th, td { text-align: left; vertical-align: top; padding: 0.4rem 0.7rem; border-bottom: 1px solid var(--line); }
th { color: var(--quiet); font-weight: 600; white-space: nowrap; background: var(--card); }
tbody tr:last-child td { border-bottom: 0; }
td.text { min-width: 9rem; max-width: 30rem; overflow-wrap: anywhere; }
td.long { min-width: 14rem; } td.short { white-space: nowrap; }
td.layers { min-width: 4.5rem; }
tr.group th { white-space: normal; background: var(--empty); color: var(--text); overflow-wrap: anywhere; }
tr.group .quiet { font-weight: 400; margin-left: 0.75rem; }
tr:has(+ tr.below) td { border-bottom: 0; padding-bottom: 0.1rem; }
tr.below td { padding-top: 0; color: var(--quiet); overflow-wrap: anywhere; }
a { color: var(--accent); }
.card + .card.flow { margin-top: 0.75rem; }
.model { margin-top: 1rem; border-top: 2px solid var(--line); }
.model > details > summary { font-size: 1.25rem; font-weight: 650; overflow-wrap: anywhere; }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.pill { display: inline-block; border-radius: 99px; padding: 0 0.55rem; white-space: nowrap; }
.pill { font-size: 0.8rem; font-weight: 600; }
.pill.good { background: var(--good-soft); color: var(--good); }
.pill.bad { background: var(--bad-soft); color: var(--bad); }
.pill.kept { background: var(--kept-soft); color: var(--kept); }
details > summary { cursor: pointer; padding: 0.5rem 0; }
td details > summary { padding: 0; }
.meter { display: inline-block; width: 4.5rem; height: 0.5rem; margin-right: 0.4rem; }
.meter { border-radius: 3px; background: var(--empty); }
.meter i { display: block; height: 100%; border-radius: 3px; background: var(--accent); }
.meter .over { background: var(--bad); }
ul.notes { padding-left: 1.2rem; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0.15rem 1rem; margin: 0; font-size: 0.87rem; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
@page { margin: 13mm 12mm; }
@media print {
  :root { color-scheme: light; --page: #fff; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  h1, h2, h3, h2 + p, .lede, .legend, summary, tr.group, tr:has(+ tr.below) { break-after: avoid; }
  h2 { margin: 1.25rem 0 0.5rem; }
  .card, .mask, .callout, .bars > div, tr { break-inside: avoid; }
  .card.flow, .scroll { break-inside: auto; }
  .cards { grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: 0.4rem; margin-top: 0.75rem; }
  .card { padding: 0.4rem 0.6rem; } .card .value { font-size: 11pt; }
  .masks { display: flex; flex-wrap: wrap; } .masks > .mask { width: 48%; flex-direction: row; font-size: 9pt; }
  .masks > .mask > .plots { flex: none; width: 8rem; } .masks > .mask > figcaption { min-width: 0; }
  .masks > .wide { width: 100%; flex-direction: column; } .masks > .wide > .plots { width: 100%; }
  .wide .plot { max-width: 9rem; }
  .bars { gap: 0.5rem; } .bar-title { font-size: 9pt; }
  .canvas { height: 7.5rem; margin-bottom: 1.5rem; }
  .scroll { overflow: visible; border: 0; border-radius: 0; }
  thead { display: table-header-group; }
  table { font-size: 8pt; }
  th, td { padding: 0.2rem 0.35rem; }
  th, td.short, .pill { white-space: normal; } td.share { white-space: nowrap; }
  details dl { grid-template-columns: repeat(2, max-content minmax(0, 1fr)); font-size: 8pt; }
  td.text, td.long, td.layers { min-width: 0; }
  details::details-content { content-visibility: visible; display: block; block-size: auto; }
}
"""
