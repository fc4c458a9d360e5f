"""The engine against one plain process: models, a reference, the matrix of layouts."""
