"""What is other than usual in torch while a module is recorded, so that all it does is recorded."""
