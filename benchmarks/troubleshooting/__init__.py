"""The troubleshooting page: messages found in the source, under entries written by hand."""
