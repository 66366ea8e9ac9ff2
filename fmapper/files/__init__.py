"""Reads untrusted files, and writes files atomically.

Everything that is read is bounded in size, depth and form, and no file that it names is opened.
Everything that is written is kept beside its target until it is complete.

    untrusted    the error for malformed contents; regular files only; links within a folder
    bounds       how many names, numbers and texts a file may have
    bounded_json JSON within bounds
    zips         the members of zip files
    checksums    the CRC-32 of bytes that are read in parts
    whole        files and folders that appear only when they are complete
    stamp        source files that show whether they were edited
    safetensors  the header of that format
    gguf         the header of that format
    hub          folders of the Hugging Face Hub by name
    urls         files behind URLs, through fsspec
    dtypes       dtypes by name, as NumPy has them
"""
