"""Files: reading a stranger's, writing whole ones, free disk space, texts in other spellings."""
