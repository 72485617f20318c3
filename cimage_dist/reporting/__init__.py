"""Reports: charts by Vega-Lite, on self-contained HTML pages and in figures for papers."""
