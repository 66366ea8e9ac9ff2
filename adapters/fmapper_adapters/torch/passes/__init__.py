"""What happens to a program that torch recorded before it is given away; `order` has the list."""
