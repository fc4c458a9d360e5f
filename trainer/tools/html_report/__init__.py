"""`zeromesh report`: the files of one or several runs as one page of HTML that needs nothing else.

runs.py       a run's files as values, and remarks on what cannot be read
figures.py    thinning, smoothing, scales and ticks (pure)
chart.py      what a chart is
curves.py     charts of lines: losses, rates, speeds
stacks.py     charts of what adds up: time, memory, communication
draw.py       a chart as SVG
sections.py   tables: figures, mesh, checkpoints, notes, configuration
page.py       the page around them, with page.css and page.js inside
markup.py     elements whose texts are escaped where they are made
"""
