"""Names that older archives import from here."""
