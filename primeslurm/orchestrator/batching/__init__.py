"""From groups to the rows that trainer ranks ask for."""
