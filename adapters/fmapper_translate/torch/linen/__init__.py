"""Files for PyTorch, of models of Flax Linen.

compact      the layers and arrays that a method of a module makes in its call
expressions, statements, files   what is Linen's in the walk of the source
layers       layers whose first input tells their sizes; files take them along
transcription   all of it
"""
