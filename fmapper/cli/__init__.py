"""The command line: `python -m fmapper devices | profile | convert`.

main        the commands and their exit status
profile     `profile FILE:MODEL`
convert     `convert FILE:MODEL --to FRAMEWORK`
conversion  what `convert` reports: how exact, how fast, on which operations
target      `FILE:NAME` on the command line
"""
