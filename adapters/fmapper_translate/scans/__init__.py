"""Lists of blocks that a file has as one block with stacked arrays, called by a scan.

lists   which lists those are, and why others are not
loops   the loops that call them, as code
"""
