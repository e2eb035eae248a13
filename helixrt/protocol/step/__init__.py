"""A replica's step: quorum, commit and lineage (DESIGN, "The life of a step")."""
