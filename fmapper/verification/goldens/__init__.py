"""The results of a model in a file that can replace it in comparisons.

recording  writes goldens, and replays them in place of the model
file       the file format; files are not trusted
"""
