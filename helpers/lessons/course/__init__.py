"""A class taught with the series: what is handed out to students, what instructors have, slides, and nbgrader's assignments."""
