"""`zeromesh report`: the files of one or several runs as one self-contained page of HTML."""
