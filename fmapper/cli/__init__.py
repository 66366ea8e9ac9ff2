"""The command line: `python -m fmapper devices | profile | convert | translate`.

main        the commands and their exit status
profile     `profile FILE:MODEL`
convert     `convert FILE:MODEL --to FRAMEWORK`
translate   `translate FILE:MODEL --to FRAMEWORK --out FILE`
conversion  the report of `convert`: accuracy, speed, operations
target      loads the object that `FILE:NAME` names
"""
