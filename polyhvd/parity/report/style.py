"""The style of the page, light and dark."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root{color-scheme:light dark;--ground:#fff;--text:#1b1b1f;--weak:#5a5a66;--edge:#c9c9d2;--soft:#f2f2f6;
--good:#0a6b2d;--bad:#b00020;--link:#0b57d0;--c0:#0b57d0;--c1:#b3500a;--c2:#0a7a4b;--c3:#8a1fb0;
--h0:#eef3f8;--h1:#cfe0f2;--h2:#8fb8e0;--h3:#f0a35e;--h4:#c4161c;--on-h:#111;--on-h4:#fff}
@media (prefers-color-scheme:dark){:root{--ground:#141419;--text:#ececf1;--weak:#b0b0bd;--edge:#44444f;
--soft:#22222a;--good:#6fdc93;--bad:#ff8f9c;--link:#9cc2ff;--c0:#7db1ff;--c1:#ffab66;--c2:#5fd39b;--c3:#d69bf5;
--h0:#20262e;--h1:#24405e;--h2:#2f6aa6;--h3:#a95a14;--h4:#e5484d;--on-h:#fff;--on-h4:#000}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--text);font:1rem/1.5 system-ui,sans-serif}
main{max-width:70rem;margin:0 auto;padding:1rem}
h1{font-size:1.6rem;line-height:1.2;overflow-wrap:anywhere}h2{font-size:1.25rem;margin-top:2rem}
h3{font-size:1rem;margin:1.2rem 0 .4rem}
p,li,dd{overflow-wrap:anywhere}
.verdict{border-left:.4rem solid;padding:.5rem .8rem;background:var(--soft)}
.good{border-color:var(--good)}.bad{border-color:var(--bad)}
.good strong{color:var(--good)}.bad strong{color:var(--bad)}
.skip{position:absolute;left:-99rem}.skip:focus{left:1rem;top:1rem;background:var(--ground);padding:.5rem}
a{color:var(--link)}
:focus-visible{outline:.2rem solid var(--link);outline-offset:.1rem}
.wide{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .5rem;border-bottom:1px solid var(--edge);text-align:left;vertical-align:top}
thead th{color:var(--weak);font-weight:600}
tbody th{font-weight:400}
tr.differ td:nth-child(2){color:var(--bad);font-weight:700}tr.agree td:nth-child(2){color:var(--good)}
.heat th,.heat td{padding:.15rem .3rem;text-align:right}
.heat th[scope=row]{text-align:left;position:sticky;left:0;background:var(--ground);white-space:nowrap}
.heat th span{color:var(--weak);display:inline-block;max-width:14rem;overflow:hidden;text-overflow:ellipsis;
vertical-align:bottom}
.heat td{min-width:2.2rem;color:var(--on-h);border:1px solid var(--ground)}
.h0{background:var(--h0)}.h1{background:var(--h1)}.h2{background:var(--h2)}.h3{background:var(--h3)}
.h4,.heat td.h4{background:var(--h4);color:var(--on-h4)}
.cell{display:inline-block;width:1rem;height:1rem;margin-right:.4rem;border:1px solid var(--edge);
vertical-align:text-bottom}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;padding:0;font-size:.9rem}
figure{margin:0}figcaption{font-weight:600}
figure>svg{width:100%;height:auto;max-height:24rem;display:block}
svg text{fill:var(--weak);font:12px system-ui,sans-serif}
.over{paint-order:stroke;stroke:var(--ground);stroke-width:4px}
.grid{stroke:var(--edge);stroke-width:1}.limit{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:2 3}
.curve{fill:none;stroke-width:2}.key{width:1.8rem;height:.5rem;margin-right:.4rem;vertical-align:middle}
.dashed{stroke-dasharray:7 5}.dotted{stroke-dasharray:2 4}
.c0{stroke:var(--c0)}.c1{stroke:var(--c1)}.c2{stroke:var(--c2)}.c3{stroke:var(--c3)}
pre{overflow-x:auto;font-size:.85rem}
summary{cursor:pointer;padding:.3rem 0;color:var(--link)}
dt{font-weight:600}dd{margin:0 0 .5rem}
.checks tbody th{min-width:17rem}.where{min-width:18rem;overflow-wrap:anywhere}.number{white-space:nowrap}
ol>li{margin-bottom:.6rem}
@media (max-width:40rem){main{padding:.7rem}svg text{font-size:22px}
.checks,.checks tbody,.checks tr,.checks th,.checks td{display:block}.checks tbody th,.where{min-width:0}
.checks thead{position:absolute;left:-99rem}.checks tbody th,.checks td{border:0;padding:.1rem 0}
.checks tbody th{font-weight:700}.checks tr{border-bottom:1px solid var(--edge);padding:.4rem 0}
.checks td::before{content:attr(data-head) ": ";color:var(--weak);font-weight:400}.number{white-space:normal}
.heat th span{max-width:6rem}}
"""
