"""What a run will need and take on a machine, said before it starts: layouts, their memory and their seconds."""
