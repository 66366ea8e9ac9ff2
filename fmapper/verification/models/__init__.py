"""Models of any framework as they are compared: called, trained, watched, and given inputs."""
