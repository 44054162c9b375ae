"""Results as a person reads them: tables, figures, pages."""
