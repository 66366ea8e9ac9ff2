"""Files that anybody may have written, and files that are whole or not there.

What is read is bounded in size, depth and form, and nothing that it names is opened. What is
written lies beside its target until it is complete.

    untrusted    the error of what does not fit; regular files only; links within a folder
    bounds       how many names, numbers and texts a file may have
    bounded_json JSON within bounds
    zips         the members of zip files
    checksums    the CRC-32 of bytes that are read in parts
    whole        files and folders that appear when they are complete
    stamp        source files that tell whether they were edited
    safetensors  the header of that format
    gguf         the header of that format
    hub          folders of the Hugging Face Hub by name
    urls         files behind URLs, through fsspec
    dtypes       dtypes by name, as NumPy has them
"""
