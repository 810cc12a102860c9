"""Mathematics without a home in one kind of evidence; numpy alone."""
