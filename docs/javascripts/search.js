// Material's search takes every word of a question for the beginning of a word, so "a" finds "auditor". Leave these out.
const SMALL =
  /(?:^|\s)(?:a|after|all|an|and|any|are|as|at|be|by|can|do|does|for|from|get|has|have|how|i|if|in|is|it|its|me|must|my|need|no|not|of|on|or|should|that|the|there|this|to|use|was|what|when|where|which|who|why|will|with|you)(?=\s|$)/gi;
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  const words = message && message.type === 2 && message.data.replace(SMALL, "").trim();
  return post.call(this, words ? { ...message, data: words } : message, ...rest);
};
