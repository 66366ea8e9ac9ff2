"""What fmapper knows of each framework, one package per framework, loaded with it."""
