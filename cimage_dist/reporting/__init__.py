"""Reports: one self-contained HTML page for a run, drawn from plain chart descriptions that figures for papers are drawn from too."""
