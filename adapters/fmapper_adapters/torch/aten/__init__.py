"""Operations of torch in programs that are converted back to torch."""
