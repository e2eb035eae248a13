"""helixrt: hybrid-parallel training that stays fast on slow links and running when parts fail."""
