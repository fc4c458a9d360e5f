"""`zeromesh report`: the files of one or several runs as one self-contained page of HTML.

`runs` reads a run's files, `charts` draws plotly figures, `page` combines them with tables.
"""
