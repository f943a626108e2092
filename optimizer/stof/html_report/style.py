# SPDX-License-Identifier: Apache-2.0
"""The style sheet of the page: fonts of the system, light or dark as the reader's system is, and one column on a phone."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #fff; --line: #dfe3e8; --text: #1b2430; --quiet: #5a6675;
  --accent: #1f6feb; --accent-soft: #9cc3fb; --empty: #eceff3; --before: #b6bfca;
  --good: #11703c; --good-soft: #dcf3e5; --bad: #b3261e; --bad-soft: #fbe2e0; --kept: #6b4e00; --kept-soft: #fbefcc;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #11151b; --card: #1a2029; --line: #303947; --text: #e6eaf0; --quiet: #9aa7b6;
    --accent: #5ea1ff; --accent-soft: #2a4f82; --empty: #242c37; --before: #56616f;
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
.callout { background: var(--kept-soft); color: var(--kept); border-radius: 10px; padding: 0.6rem 1rem; margin-top: 0.75rem; }
.callout { overflow-wrap: anywhere; }
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
.track .after { background: var(--accent); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 10px; background: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: 0.87rem; }
th, td { text-align: left; vertical-align: top; padding: 0.4rem 0.7rem; border-bottom: 1px solid var(--line); }
th { color: var(--quiet); font-weight: 600; white-space: nowrap; background: var(--card); }
tbody tr:last-child td { border-bottom: 0; }
td.text { min-width: 9rem; max-width: 30rem; overflow-wrap: anywhere; }
td.long { min-width: 14rem; } td.short { white-space: nowrap; }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.pill { display: inline-block; border-radius: 99px; padding: 0 0.55rem; white-space: nowrap; }
.pill { font-size: 0.8rem; font-weight: 600; }
.pill.good { background: var(--good-soft); color: var(--good); }
.pill.bad { background: var(--bad-soft); color: var(--bad); }
.pill.kept { background: var(--kept-soft); color: var(--kept); }
details > summary { cursor: pointer; padding: 0.5rem 0; }
.meter { display: inline-block; width: 4.5rem; height: 0.5rem; margin-right: 0.4rem; }
.meter { border-radius: 3px; background: var(--empty); }
.meter i { display: block; height: 100%; border-radius: 3px; background: var(--accent); }
.meter .over { background: var(--bad); }
ul.notes { padding-left: 1.2rem; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0.15rem 1rem; margin: 0; font-size: 0.87rem; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
footer { margin-top: 2.5rem; color: var(--quiet); font-size: 0.82rem; }
@media print { details > summary { display: none; } .card, .scroll { break-inside: avoid; } }
"""
