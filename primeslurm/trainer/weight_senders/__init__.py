"""The trainer's side of weight updates: publishing policies as files, or sending them to the engines."""
