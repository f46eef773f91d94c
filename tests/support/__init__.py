"""What tests share: builders of models, rows and folders, fakes of servers, and processes of their own."""
