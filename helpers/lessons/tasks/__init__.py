"""Region tasks as data: a module for each decade of rungs, and the catalogue of all. No answers: those are the rungs' own."""
