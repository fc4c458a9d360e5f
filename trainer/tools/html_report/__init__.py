"""`zeromesh report`: the files of one or several runs as one page of HTML that needs nothing else.

`runs` reads a run's files, `charts` draws figures of plotly, `page` puts them and tables into one file.
"""
