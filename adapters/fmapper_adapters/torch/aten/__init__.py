"""Operations of torch in programs that go back to torch: which may be called, and how."""
