"""The results of a model in a file that stands for it.

recording  writes goldens, and answers as the model that they are of
file       the file, which is not trusted
"""
